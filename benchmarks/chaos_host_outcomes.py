"""Outcomes of host faults, from the events of the run and the end of its processes.

Pure; times are in seconds since 1970.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_host_schedule import ENDS_THE_HOST, HostFault, PlannedHost
from chaos_inject import Applied
from chaos_outcomes import CLOCKS_S, ECHO_S, HEALED, RESTART_S, two_percentiles, unprovoked
from chaos_run import host_of, slot_of


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
    return [_outcome(one, _between(events, one, _next(one, struck))) for one in struck]


def _next(fault: StruckHost, struck: Sequence[StruckHost]) -> float:
    others = (one.time for one in struck if one.host == fault.host and one.time > fault.time)
    return min(others, default=math.inf)


def _between(
    events: Sequence[Mapping[str, Any]], fault: StruckHost, until: float
) -> list[Mapping[str, Any]]:
    return [event for event in events if fault.time - CLOCKS_S <= event["time"] < until]


def _outcome(struck: StruckHost, later: Sequence[Mapping[str, Any]]) -> HostOutcome:
    lost = _lost(struck.host, later)
    if struck.planned.fault not in ENDS_THE_HOST:
        return HostOutcome(struck, lost is None, _after(struck, lost))
    back = [_back(struck, actor, later) for actor in struck.actors]
    recovered = None if not back or None in back else max(one for one in back if one is not None)
    owed = None in back and not _ended_soon(lost, later)
    cut = struck.planned.fault is HostFault.CUT
    fenced = struck.gone - struck.time if cut and struck.gone is not None else None
    healed = lost is not None and not owed and not (cut and fenced is None)
    return HostOutcome(struck, healed, _after(struck, lost), recovered, fenced)


def _lost(host: str, later: Sequence[Mapping[str, Any]]) -> float | None:
    told = (one["time"] for one in later if one["event"] == "host_lost" and host_of(one) == host)
    return next(told, None)


def _back(struck: StruckHost, actor: str, later: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds until an actor of the host was restarted on another one."""
    for event in later:
        elsewhere = event["event"] in HEALED and host_of(event) != struck.host
        if elsewhere and slot_of(event["actor"]) == slot_of(actor):
            return _after(struck, event["time"])
    return None


def _ended_soon(lost: float | None, later: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run finished before another actor could have been started."""
    finished = [event["time"] for event in later if event["event"] == "run_finished"]
    return lost is not None and bool(finished) and finished[0] - lost < RESTART_S


def _after(struck: StruckHost, moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - struck.time)


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
