"""A hang is a question without an answer, in time during which the asker itself was awake.

Busy intervals of actors, and the timeline of a step that is made of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_host import until

from composer_mesh.mesh.heartbeat import (
    MOST,
    ActivityLog,
    Busy,
    HeartbeatRules,
    LastAnswer,
    wait_until_silent,
)
from composer_mesh.mesh.spawned import moved
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.run.parts import GAPS, MOST_OF_A_STEP, TimelineView, timeline_of

RULES = HeartbeatRules(every_s=0.001, hang_s=0.01)


class Asked:
    """An actor that answers as often as it is told to, then never again."""

    def __init__(self, answers: int, error: Exception | None = None) -> None:
        self.answers, self.error, self.questions = answers, error, 0

    async def describe(self) -> None:
        self.questions += 1
        if self.questions > self.answers:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


class HeardAtEveryLook(LastAnswer):
    """An actor that somebody else is talking to all the time."""

    looks = 0

    def age_s(self) -> float:
        self.looks += 1
        return 0.0


@pytest.mark.parametrize("error", [None, RuntimeError("injected")])
async def test_an_actor_is_silent_at_its_first_unanswered_question(error: Exception | None) -> None:
    actor = Asked(answers=3, error=error)
    await wait_until_silent(actor.describe, RULES, LastAnswer())
    assert actor.questions == 4


async def test_an_answer_that_takes_long_but_comes_is_no_hang() -> None:
    patient = HeartbeatRules(every_s=0.001, hang_s=60.0)
    asked, release = asyncio.Event(), asyncio.Event()
    questions: Iterator[int] = iter(range(1, 100))
    counted: list[int] = []

    async def describe() -> None:
        counted.append(next(questions))
        if counted[-1] == 1:
            asked.set()
            await release.wait()
        if counted[-1] == 3:
            await asyncio.Event().wait()

    listening = asyncio.ensure_future(wait_until_silent(describe, patient, LastAnswer()))
    await asked.wait()
    assert not listening.done()
    release.set()
    await until(lambda: len(counted) == 3)
    assert not listening.done()
    listening.cancel()


async def test_time_in_which_the_asker_stood_still_does_not_count() -> None:
    rules = HeartbeatRules(every_s=0.05, hang_s=0.2)
    loop = asyncio.get_running_loop()
    asked, late = asyncio.Event(), loop.create_future()
    answered: list[bool] = []

    async def describe() -> None:
        asked.set()
        await asyncio.shield(late)
        answered.append(True)

    listening = asyncio.ensure_future(wait_until_silent(describe, rules, LastAnswer()))
    await asked.wait()
    loop.call_soon(time.sleep, 0.5)  # this process stands still for longer than a hang
    loop.call_soon(late.set_result, None)
    await until(lambda: bool(answered))
    assert not listening.done()
    listening.cancel()


async def test_an_actor_that_answers_others_is_not_asked() -> None:
    actor, last = Asked(answers=0), HeardAtEveryLook()
    listening = asyncio.ensure_future(wait_until_silent(actor.describe, RULES, last))
    await until(lambda: last.looks > 10)
    assert not actor.questions
    assert not listening.done()
    listening.cancel()


async def test_an_actor_is_asked_again_once_its_last_word_is_old() -> None:
    actor, last = Asked(answers=0), LastAnswer()
    last.record_answer()
    await wait_until_silent(actor.describe, RULES, last)
    assert actor.questions == 1


@pytest.mark.parametrize(("every_s", "hang_s"), [(0.0, 1.0), (2.0, 1.0)])
def test_a_hang_is_no_shorter_than_a_beat(every_s: float, hang_s: float) -> None:
    with pytest.raises(ValueError, match="hang_s no shorter than every_s"):
        HeartbeatRules(every_s, hang_s)


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


def test_a_line_has_the_longest_intervals_of_each_actor_in_order_without_questions() -> None:
    busy = [Busy("a", "describe", 0.0, 9.0), Busy("a", "train", 1.0, 1.5)]
    busy += [Busy("a", "play", float(n), n + 0.5) for n in range(MOST_OF_A_STEP + 5)]
    busy.append(Busy("b", "step", 3.0, 3.25))
    line = timeline_of(7, 0.0, 100.0, busy)
    assert (line["step"], len(line["busy"])) == (7, MOST_OF_A_STEP // 2 + 1)
    assert ["b", "step", 3.0, 3.25] in line["busy"]
    assert [one[2] for one in line["busy"]] == sorted(one[2] for one in line["busy"])


def test_an_actor_worked_as_long_as_its_intervals_cover_of_the_step() -> None:
    busy = [Busy("a", "play", 8.0, 11.0), Busy("a", "pull", 10.5, 12.0), Busy("a", "play", 19, 25)]
    line = timeline_of(1, 10.0, 20.0, [*busy, Busy("b", "train", 0.0, 9.0)])
    assert line["worked"] == {"a": 3.0, "b": 0.0}


def test_short_calls_with_short_gaps_are_one_interval_and_count_as_what_they_took() -> None:
    gap, call = 9.0 / GAPS / 2, 9.0 / GAPS / 100
    begins = [1.0 + n * (gap + call) for n in range(50)]
    line = timeline_of(1, 0.0, 9.0, [Busy("a", "step", one, one + call) for one in begins])
    ((_, _, began, ended),) = line["busy"]
    assert (began, ended) == (1.0, pytest.approx(begins[-1] + call, abs=0.001))
    assert line["worked"]["a"] == pytest.approx(50 * call, abs=0.001)


def test_times_of_another_host_lie_within_the_call_that_brought_them() -> None:
    busy = [Busy("", "generate", 5.0, 6.0)]
    assert moved(busy, 10.0, sent=9.0, received=11.0) == busy
    assert moved(busy, 111.0, sent=9.0, received=11.0) == [Busy("", "generate", -95.0, -94.0)]
    assert moved(busy, 2.0, sent=9.0, received=11.0) == [Busy("", "generate", 12.0, 13.0)]


class FakeView:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def update(self, step: Any) -> None:
        self.seen.append(step["step"])

    def evaluation(self, evaluation: Evaluation) -> None:
        self.seen.append(evaluation)

    def phase(self, text: str) -> None:
        self.seen.append(text)


async def test_each_step_writes_a_line_and_the_display_receives_everything(clock: Clock) -> None:
    log, lines, view = ActivityLog(clock), list[Any](), FakeView()
    answers, failures = asyncio.Event(), list[str]()

    async def take() -> list[Busy]:
        found = log.take()
        await answers.wait()
        return found

    with log.call("a", "load"):
        clock.now = 1.0
    answers.set()
    timeline = TimelineView(view, take, lines.append, lambda name, _: failures.append(name), clock)
    async with timeline:
        answers.clear()
        for step in (1, 2, 3):
            with log.call("trainer", "train"):
                clock.now += 4.0
            timeline.phase("training")
            timeline.update({"step": step, "time/step_s": 3.0})
            await asyncio.sleep(0)
        timeline.evaluation(Evaluation(3, 0.5, 8))
        assert lines == []  # actors have not answered, and nothing has waited for them
        answers.set()
    phases = [said for step in (1, 2, 3) for said in ("training", step)]
    assert view.seen == [*phases, Evaluation(3, 0.5, 8)]
    assert [(line["step"], line["began"], line["ended"]) for line in lines] == [
        (1, 2.0, 5.0),
        (2, 6.0, 9.0),
        (3, 10.0, 13.0),
    ]
    assert [line["worked"] for line in lines] == [{"trainer": 3.0}] * 3
    assert lines[1]["busy"] == [["trainer", "train", 5.0, 9.0]]
    assert lines[2]["busy"] == [["trainer", "train", 9.0, 13.0]]
    assert failures == []
