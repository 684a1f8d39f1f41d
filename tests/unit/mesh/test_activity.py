"""Busy intervals of actors, and the timeline of a step that is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.mesh.heartbeat import MOST, ActivityLog, Busy
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.run.parts import MOST_OF_A_STEP, TimelineView, timeline_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_calls_that_overlap_are_one_interval(clock: Clock) -> None:
    log = ActivityLog(clock)
    with log.call("a", "play"):
        clock.now = 1.0
        with log.call("a", "play"), log.call("a", "pull"):
            clock.now = 2.0
        clock.now = 3.0
    assert log.take() == [Busy("a", "pull", 1.0, 2.0), Busy("a", "play", 0.0, 3.0)]
    assert log.take() == []


def test_an_interval_that_goes_on_is_divided_when_it_is_taken(clock: Clock) -> None:
    log = ActivityLog(clock)
    with log.call("a", "play"):
        clock.now = 2.0
        assert log.take() == [Busy("a", "play", 0.0, 2.0)]
        clock.now = 5.0
    assert log.take() == [Busy("a", "play", 2.0, 5.0)]


def test_a_call_that_fails_ends_its_interval(clock: Clock) -> None:
    log = ActivityLog(clock)
    with pytest.raises(ValueError, match="lost"), log.call("a", "play"):
        raise ValueError("lost")
    assert len(log.take()) == 1


def test_what_nobody_takes_does_not_grow(clock: Clock) -> None:
    log = ActivityLog(clock)
    for _ in range(MOST + 10):
        with log.call("a", "play"):
            pass
    assert len(log.take()) == MOST


def test_a_line_has_the_longest_intervals_in_order_without_questions() -> None:
    busy = [Busy("a", "describe", 0.0, 9.0), Busy("a", "train", 1.0, 1.0001)]
    busy += [Busy("a", "play", float(n), n + 0.5) for n in range(MOST_OF_A_STEP + 5)]
    busy.append(Busy("b", "train", 3.0, 30.0))
    line = timeline_of(7, 0.0, 40.0, busy)
    assert (line["step"], len(line["busy"])) == (7, MOST_OF_A_STEP)
    assert ["b", "train", 3.0, 30.0] in line["busy"]
    assert [one[2] for one in line["busy"]] == sorted(one[2] for one in line["busy"])


class FakeView:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def update(self, step: Any) -> None:
        self.seen.append(step["step"])

    def evaluation(self, evaluation: Evaluation) -> None:
        self.seen.append(evaluation)

    def phase(self, text: str) -> None:
        self.seen.append(text)


def test_each_step_writes_a_line_and_the_display_hears_of_everything(clock: Clock) -> None:
    log, lines, view = ActivityLog(clock), list[Any](), FakeView()
    with log.call("a", "load"):
        clock.now = 1.0
    timeline = TimelineView(view, log.take, lines.append, clock)
    with log.call("trainer", "train"):
        clock.now = 5.0
    timeline.phase("training")
    timeline.update({"step": 1, "time/step_s": 3.0})
    timeline.evaluation(Evaluation(1, 0.5, 8))
    assert view.seen == ["training", 1, Evaluation(1, 0.5, 8)]
    assert lines == [
        {"step": 1, "began": 2.0, "ended": 5.0, "busy": [["trainer", "train", 1.0, 5.0]]}
    ]
