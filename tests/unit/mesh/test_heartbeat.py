"""A hang is a question without an answer, in time during which the asker itself was awake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from fake_host import until

from composer_mesh.mesh.heartbeat import HeartbeatRules, LastAnswer, wait_until_silent

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
    await asyncio.wait_for(wait_until_silent(actor.describe, RULES, LastAnswer()), 5)
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
    await asyncio.wait_for(wait_until_silent(actor.describe, RULES, last), 5)
    assert actor.questions == 1


@pytest.mark.parametrize(("every_s", "hang_s"), [(0.0, 1.0), (2.0, 1.0)])
def test_a_hang_is_no_shorter_than_a_beat(every_s: float, hang_s: float) -> None:
    with pytest.raises(ValueError, match="hang_s no shorter than every_s"):
        HeartbeatRules(every_s, hang_s)
