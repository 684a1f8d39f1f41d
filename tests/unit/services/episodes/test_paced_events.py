"""Paced events: a burst becomes one line that says how many it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from composer_mesh.services.episodes.retries import PacedEvents


@dataclass
class Log:
    """A recorder and a clock."""

    now: float = 0.0
    told: list[tuple[str, str, str]] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)

    def record(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.told.append((kind, actor, detail))
        self.fields.append(fields)

    def clock(self) -> float:
        return self.now


def paced(log: Log) -> PacedEvents:
    return PacedEvents(log.record, interval_s=1.0, clock=log.clock)


def test_the_first_event_of_a_burst_is_told_at_once_and_the_next_counts_the_others() -> None:
    log = Log()
    events = paced(log)
    for number in range(5):
        log.now = 0.1 * number
        events("retried", "e-0", f"no. {number}")
    log.now = 1.0
    events("retried", "e-1", "no. 5")
    assert log.told == [
        ("retried", "e-0", "no. 0"),
        ("retried", "e-1", "no. 5 (and 4 more before it)"),
    ]


def test_each_kind_has_a_pace_of_its_own() -> None:
    log = Log()
    events = paced(log)
    events("retried", "", "a")
    events("poisoned", "", "b", cause="c")
    assert log.told == [("retried", "", "a"), ("poisoned", "", "b")]
    assert log.fields == [{}, {"cause": "c"}]


def test_what_was_held_back_is_told_in_the_end_and_once() -> None:
    log = Log()
    events = paced(log)
    for name in "abc":
        events("retried", "", name)
    events.flush()
    events.flush()
    assert log.told == [("retried", "", "a"), ("retried", "", "2 more")]
