"""Seeded schedule of host faults: which, how, and when.

As for actors, moments are shares of the steps of a run, and the injector selects the host.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

FIRST, LAST = 0.05, 0.85
"""The share of a run in which faults fall; its last steps show that it recovered."""


class HostFault(StrEnum):
    """A fault of a host."""

    KILLED = "host killed"
    """SIGKILL of the worker and all its processes, at once."""
    CUT = "network cut"
    """Its packets are dropped, for longer than its lease."""
    HUNG = "host hung"
    """SIGSTOP of the worker and all its processes."""
    SHORT = "short cut"
    """Its packets are dropped for a part of its lease."""


ENDS_THE_HOST = frozenset({HostFault.KILLED, HostFault.CUT, HostFault.HUNG})


@dataclass(frozen=True)
class PlannedHost:
    """One fault, due after the share `at` of the steps, on the `place`-th host that has actors."""

    number: int
    at: float
    place: int
    fault: HostFault


def host_schedule(seed: int, count: int) -> list[PlannedHost]:
    """Return `count` faults in order, evenly spaced; every kind equally often."""
    if count < 1:
        raise ValueError(f"count is {count}, but a schedule has 1 fault or more: raise count")
    rng = random.Random(seed)
    sorts = list(HostFault)
    faults = [sorts[number % len(sorts)] for number in range(count)]
    rng.shuffle(faults)
    return [
        PlannedHost(number, FIRST + (LAST - FIRST) * number / count, rng.randrange(2), fault)
        for number, fault in enumerate(faults)
    ]
