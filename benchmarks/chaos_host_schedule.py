"""Which host a chaos run loses, how, and when: the same seed, the same schedule.

As for actors, moments are shares of the steps of a run, and which host is struck is the injector's
business.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

FIRST, LAST = 0.05, 0.85
"""The share of a run in which hosts are lost: its last steps show that it recovered."""


class HostFault(StrEnum):
    """What is done to a host."""

    KILLED = "host killed"
    """SIGKILL of the worker and of all that it runs, at once."""
    CUT = "network cut"
    """Its packets are dropped, for longer than its lease."""
    HUNG = "host hung"
    """SIGSTOP of the worker and of all that it runs."""
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
    """`count` faults in the order of their moments, evenly apart; every sort as often as others."""
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
