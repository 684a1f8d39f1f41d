"""Seeded schedules of the faults of actors and of hosts: which, how, and when.

Moments are shares of a run's steps, so that a run that recovers slowly is not hit faster than it
progresses. The injectors select the process and the host.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST, LAST, CALM = 0.02, 0.75, 0.85
"""Shares of a run: faults are due from the first to the last one, and those whose process was not
there in time still take effect before the third; the steps after it show that the run recovered,
and are long enough for a stopped process to count as hung."""
FIRST_OF_HOSTS, LAST_OF_HOSTS = 0.05, 0.85
"""The share of a run in which faults of hosts fall; its last steps show that it recovered."""
BURST_SIZE = 4
BURST_S = 0.5
"""The faults of a burst fall within this time."""
EVERY_BURST, EVERY_SYNC = 12, 6
"""One burst per this many faults, and one fault during a weight sync per this many."""


class Fault(StrEnum):
    """A fault of a process."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    RAISE = "exception"
    EXIT = "os._exit"
    MEMORY = "memory limit"
    CUT = "cut connection"


ENDS_THE_PROCESS = frozenset({Fault.KILL, Fault.STOP, Fault.EXIT})
"""Faults after which only a new process can continue."""

KINDS = (
    "trainer",
    "generator",
    "environment",
    "rollouts",
    "sdpo_teacher",
    "teacher_replay",
    "reference",
    "hint_writer",
    "expert_server",
)
SYNC_ENDPOINTS = {"generator": "pull", "trainer": "publish", "sdpo_teacher": "pull"}
"""Endpoints that each kind runs during a weight sync."""


@dataclass(frozen=True)
class Planned:
    """One fault: due `delay_s` after the share `at` of the steps, on the `place`-th of a kind.

    With an `endpoint` it waits for the next call of that endpoint and takes effect inside it.
    """

    number: int
    at: float
    delay_s: float
    kind: str
    place: int
    fault: Fault
    endpoint: str | None = None
    burst: int | None = None


@dataclass(frozen=True)
class _Strike:
    """A fault without its moment."""

    kind: str
    fault: Fault
    place: int
    endpoint: str | None = None


def schedule(seed: int, count: int, kinds: Sequence[str] = KINDS) -> list[Planned]:
    """Return `count` faults in order of their moments.

    Every kind meets every fault where `count` is large enough; there are bursts, one of which kills
    several generators at once, and faults during weight syncs.
    """
    if count < 1:
        raise ValueError(f"count is {count}, but a schedule has 1 fault or more: raise count")
    rng = random.Random(seed)
    strike_groups = _strike_groups(rng, list(kinds), count)
    bursts = iter(range(len(strike_groups)))
    planned: list[Planned] = []
    for number, strikes in enumerate(strike_groups):
        at = FIRST + (LAST - FIRST) * (number + rng.random()) / len(strike_groups)
        burst = next(bursts) if len(strikes) > 1 else None
        width = BURST_S if burst is not None else 2.0
        for strike in strikes:
            planned.append(
                Planned(
                    len(planned),
                    at,
                    rng.random() * width,
                    strike.kind,
                    strike.place,
                    strike.fault,
                    strike.endpoint,
                    burst,
                )
            )
    return planned


def _strike_groups(rng: random.Random, kinds: list[str], count: int) -> list[list[_Strike]]:
    """Return groups of simultaneous faults, in random order."""
    sync = _sync_strikes(rng, kinds, count // EVERY_SYNC)
    plain = _plain_strikes(rng, kinds, count - len(sync))
    strike_groups: list[list[_Strike]] = [[strike] for strike in sync]
    for number in range(count // EVERY_BURST):
        if number == 0 and "generator" in kinds:
            strike_groups.append(_every_generator(plain))
        else:
            strike_groups.append(_take_distinct(plain, BURST_SIZE))
    strike_groups += [[strike] for strike in plain]
    rng.shuffle(strike_groups)
    return strike_groups


def _plain_strikes(rng: random.Random, kinds: list[str], count: int) -> list[_Strike]:
    """Return faults that cover kinds and faults evenly; no pair recurs before all have occurred."""
    kinds, faults = rng.sample(kinds, len(kinds)), rng.sample(list(Fault), len(Fault))
    strikes = []
    for number in range(count):
        turn, kind = divmod(number, len(kinds))
        fault = faults[(kind + turn) % len(faults)]
        strikes.append(_Strike(kinds[kind], fault, rng.randrange(8)))
    return strikes


def _sync_strikes(rng: random.Random, kinds: list[str], count: int) -> list[_Strike]:
    pairs = [
        _Strike(kind, fault, rng.randrange(8), endpoint)
        for kind, endpoint in SYNC_ENDPOINTS.items()
        if kind in kinds
        for fault in Fault
    ]
    rng.shuffle(pairs)
    return pairs[:count]


def _every_generator(plain: list[_Strike]) -> list[_Strike]:
    """Return simultaneous kills of two generators, in exchange for two other faults.

    Those are faults on generators, or else on a kind that is met twice.
    """
    own = [one for one in plain if one.kind == "generator"]
    met = Counter(one.kind for one in plain)
    spare = [one for one in plain if one not in own and met[one.kind] > 1]
    for strike in (own + spare)[:2]:
        plain.remove(strike)
    return [_Strike("generator", Fault.KILL, place) for place in (0, 1)]


def _take_distinct(plain: list[_Strike], size: int) -> list[_Strike]:
    """Remove from `plain`, and return, faults on different kinds."""
    taken: list[_Strike] = []
    for strike in list(plain):
        if len(taken) < size and strike.kind not in {one.kind for one in taken}:
            taken.append(strike)
            plain.remove(strike)
    return taken


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
        PlannedHost(
            number,
            FIRST_OF_HOSTS + (LAST_OF_HOSTS - FIRST_OF_HOSTS) * number / count,
            rng.randrange(2),
            fault,
        )
        for number, fault in enumerate(faults)
    ]
