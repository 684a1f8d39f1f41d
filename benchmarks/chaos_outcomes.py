"""Outcomes of faults of actors and hosts, from the events of the run: when detected, when healed.

Those of hosts also from the end of their processes. Pure; times are in seconds since 1970, on one
machine.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chaos_inject import Applied
from chaos_run import host_of, slot_of
from chaos_schedule import ENDS_THE_HOST, ENDS_THE_PROCESS, HostFault, PlannedHost

NOTICED = frozenset({"actor_died", "actor_hung", "actor_stopped"})
"""Events that report the end of a process."""
HEALED = frozenset({"actor_restarted", "trainer_restarted"})
ECHO_S = 60.0
"""How long after a fault the end of its process may be attributed to it."""
RESTART_S = 3.0
"""Less than a backoff and a process start take."""
CLOCKS_S = 0.1
"""How much earlier than its fault an event may appear, because times are rounded."""


class Fate(StrEnum):
    """How a fault ended."""

    RESTARTED = "restarted"
    ABSORBED = "absorbed"
    """The process continued, or none had to be replaced."""
    ENDED_FIRST = "run ended"
    """The run finished sooner than a restart would have taken."""
    GIVEN_UP = "given up"
    LOST = "not healed"


@dataclass(frozen=True)
class Outcome:
    """One fault and its outcome; None where something did not happen."""

    applied: Applied
    fate: Fate
    detected_s: float | None = None
    recovered_s: float | None = None


def outcomes(applied: Sequence[Applied], events: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return the outcome of every fault, in order."""
    return [_outcome(fault, events, _until(fault, applied)) for fault in applied]


def _until(fault: Applied, applied: Sequence[Applied]) -> float:
    """Return the time until which the end of the process is attributed to this fault.

    A fault that ends the process always causes its end. Another fault may leave it intact, and a
    later end is then caused by the next fault on it, or by something else.
    """
    if fault.planned.fault in ENDS_THE_PROCESS:
        return math.inf
    others = [one.time for one in applied if one.actor == fault.actor and one.time > fault.time]
    return min([fault.time + ECHO_S, *others])


def unprovoked(
    applied: Sequence[Applied], events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return deaths of actors without a fault on them within `ECHO_S` before."""
    return [
        event
        for event in events
        if event["event"] == "actor_died"
        and not any(
            fault.actor == event["actor"] and -CLOCKS_S <= event["time"] - fault.time <= ECHO_S
            for fault in applied
        )
    ]


def _outcome(fault: Applied, events: Sequence[Mapping[str, Any]], until: float) -> Outcome:
    later = [event for event in events if event["time"] >= fault.time - CLOCKS_S]
    noticed, healed = _end_and_heal(fault, later, until)
    reported = noticed or _first(later, lambda event: _mentions(event, fault))
    detected = None if reported is None or reported is healed else _after(fault, reported)
    if healed is not None:
        return Outcome(fault, Fate.RESTARTED, detected, _after(fault, healed))
    if noticed is None and fault.planned.fault not in ENDS_THE_PROCESS:
        return Outcome(fault, Fate.ABSORBED, detected)
    given_up = any(one["event"] == "actor_given_up" and _same_slot(one, fault) for one in later)
    if given_up:
        return Outcome(fault, Fate.GIVEN_UP, detected)
    return Outcome(fault, Fate.ENDED_FIRST if _ended_soon(noticed, later) else Fate.LOST, detected)


def _ended_soon(noticed: Mapping[str, Any] | None, later: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the run finished before a replacement could have been started."""
    finished = _first(later, lambda event: event["event"] == "run_finished")
    if noticed is None or finished is None:
        return False
    return bool(finished["time"] - noticed["time"] < RESTART_S)


def _end_and_heal(
    fault: Applied, later: Sequence[Mapping[str, Any]], until: float
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the events of the end of this very process, and of its successor's start.

    A restart before the end was reported is not this fault's, because names recur; but a trainer is
    also restarted after an error, which no other event reports.
    """
    noticed = None
    for event in later:
        if event["event"] in NOTICED and event["actor"] == fault.actor:
            if noticed is None and event["time"] > until:
                return None, None
            noticed = noticed or event
        elif _heals(event, fault):
            own = noticed is not None or _mentions(event, fault)
            return noticed, event if own else None
    return noticed, None


def _heals(event: Mapping[str, Any], fault: Applied) -> bool:
    if fault.planned.kind == "trainer" and event["event"] == "trainer_restarted":
        return True
    return event["event"] in HEALED and _same_slot(event, fault)


def _same_slot(event: Mapping[str, Any], fault: Applied) -> bool:
    return slot_of(event["actor"]) == slot_of(fault.actor)


def _mentions(event: Mapping[str, Any], fault: Applied) -> bool:
    return f"injected fault {fault.planned.number}:" in event["detail"]


def _first(
    events: Iterable[Mapping[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any] | None:
    return next(filter(wanted, events), None)


def _after(fault: "Applied | StruckHost", event: Mapping[str, Any]) -> float:
    return max(0.0, event["time"] - fault.time)


@dataclass(frozen=True)
class Summary:
    """Outcomes of one kind of fault as a table row."""

    faults: int
    detected: list[float]
    recovered: list[float]
    fates: Mapping[Fate, int]

    @classmethod
    def of(cls, found: Sequence[Outcome]) -> "Summary":
        fates = {fate: sum(one.fate is fate for one in found) for fate in Fate}
        detected = [one.detected_s for one in found if one.detected_s is not None]
        recovered = [one.recovered_s for one in found if one.recovered_s is not None]
        return cls(len(found), detected, recovered, fates)

    def cells(self) -> list[str]:
        return [
            str(self.faults),
            two_percentiles(self.detected),
            two_percentiles(self.recovered),
            *(str(self.fates[fate] or "") for fate in Fate),
        ]


def two_percentiles(seconds: Sequence[float]) -> str:
    """Format the median and the 95th percentile."""
    if not seconds:
        return "-"
    return f"{percentile(seconds, 0.5):.1f} / {percentile(seconds, 0.95):.1f}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed; the median is the usual one."""
    ordered = sorted(values)
    if share == 0.5:
        return statistics.median(ordered)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class StruckHost:
    """A host that was hit by a fault: when, its actors, and when its last process was gone."""

    planned: PlannedHost
    time: float
    host: str
    actors: tuple[str, ...]
    gone: float | None = None
    """None while it has processes, and where the benchmark had to kill them."""


@dataclass(frozen=True)
class HostOutcome:
    """One fault and its outcome; None where something did not happen.

    `fenced_s` is when a host that was cut off had ended its own processes; `healed` is whether
    everything required happened.
    """

    struck: StruckHost
    healed: bool
    detected_s: float | None = None
    recovered_s: float | None = None
    fenced_s: float | None = None

    @property
    def fenced_late(self) -> bool:
        """Whether the run reassigned the work while the host could still do it."""
        if self.struck.planned.fault is not HostFault.CUT or self.detected_s is None:
            return False
        return self.fenced_s is None or self.fenced_s > self.detected_s


def host_outcomes(
    struck: Sequence[StruckHost], events: Sequence[Mapping[str, Any]]
) -> list[HostOutcome]:
    """Return the outcome of every fault, in order.

    Events after the next fault on a host are attributed to that fault.
    """
    return [_host_outcome(one, _between(events, one, _next(one, struck))) for one in struck]


def _next(fault: StruckHost, struck: Sequence[StruckHost]) -> float:
    others = (one.time for one in struck if one.host == fault.host and one.time > fault.time)
    return min(others, default=math.inf)


def _between(
    events: Sequence[Mapping[str, Any]], fault: StruckHost, until: float
) -> list[Mapping[str, Any]]:
    return [event for event in events if fault.time - CLOCKS_S <= event["time"] < until]


def _host_outcome(struck: StruckHost, later: Sequence[Mapping[str, Any]]) -> HostOutcome:
    lost = _first(later, lambda one: one["event"] == "host_lost" and host_of(one) == struck.host)
    detected = None if lost is None else _after(struck, lost)
    if struck.planned.fault not in ENDS_THE_HOST:
        return HostOutcome(struck, lost is None, detected)
    back = [_back(struck, actor, later) for actor in struck.actors]
    seconds = [_after(struck, one) for one in back if one is not None]
    recovered = max(seconds) if seconds and None not in back else None
    owed = None in back and not _ended_soon(lost, later)
    cut = struck.planned.fault is HostFault.CUT
    fenced = struck.gone - struck.time if cut and struck.gone is not None else None
    healed = lost is not None and not owed and not (cut and fenced is None)
    return HostOutcome(struck, healed, detected, recovered, fenced)


def _back(
    struck: StruckHost, actor: str, later: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the event of the start of an actor of the host on another one."""
    return _first(
        later,
        lambda event: (
            event["event"] in HEALED
            and host_of(event) != struck.host
            and slot_of(event["actor"]) == slot_of(actor)
        ),
    )


def unexplained(
    applied: Sequence[Applied],
    struck: Sequence[StruckHost],
    events: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return deaths of actors that no fault, of their own or of their host, explains."""
    return [
        death
        for death in unprovoked(applied, events)
        if not any(_explains(one, death) for one in struck)
    ]


def _explains(struck: StruckHost, death: Mapping[str, Any]) -> bool:
    if struck.planned.fault not in ENDS_THE_HOST or host_of(death) != struck.host:
        return False
    return bool(-CLOCKS_S <= death["time"] - struck.time <= ECHO_S)


def lost_for_nothing(
    struck: Sequence[StruckHost], events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return losses of hosts that no fault caused."""
    ended = {one.host: one.time for one in struck if one.planned.fault in ENDS_THE_HOST}
    return [
        event
        for event in events
        if event["event"] == "host_lost"
        and event["time"] < ended.get(host_of(event) or "", float("inf")) - CLOCKS_S
    ]


def cells(found: Sequence[HostOutcome]) -> list[str]:
    """Return the outcomes of one kind of fault as a table row."""
    columns = ("detected_s", "recovered_s", "fenced_s")
    seconds = [
        [value for one in found if (value := getattr(one, name)) is not None] for name in columns
    ]
    healed = sum(one.healed for one in found)
    return [str(len(found)), *map(two_percentiles, seconds), str(healed)]
