"""The teacher client waits for money that is only set aside, and never for money that is spent."""

from __future__ import annotations

import asyncio

import pytest
from preferences import ADD, answer, failure

from composer_mesh.rollouts.pairs import FailureKind, FrozenState, TeacherAnswer, TeacherReply
from composer_mesh.services.offline.session import (
    RESTS,
    Stopped,
    TeacherClient,
    is_short,
    together,
)

BOUND, COST, CEILING = 100, 10, 300
REST_S = 0.002


def state(number: int) -> FrozenState:
    return FrozenState(f"s{number}", [{"role": "user", "content": str(number)}], number)


class Till:
    """A panel of teachers under one ceiling: each answer sets `BOUND` aside and costs `COST`."""

    def __init__(self, ceiling: int = CEILING) -> None:
        self.ceiling, self.spent, self.aside = ceiling, 0, 0
        self.paid: set[tuple[str, str]] = set()
        self.running = self.most = self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return list(await asyncio.gather(*(self._reply(state, name) for name in "abc"[:n])))
        finally:
            self.running -= 1

    async def _reply(self, state: FrozenState, teacher: str) -> TeacherReply:
        if (state.state_id, teacher) in self.paid:
            return answer(teacher, ADD, 0.0, cached=True)
        if self.spent + self.aside + BOUND > self.ceiling:
            return failure(teacher, FailureKind.BUDGET)
        self.aside += BOUND
        await self.gate.wait()
        await asyncio.sleep(0)
        self.aside, self.spent = self.aside - BOUND, self.spent + COST
        self.paid.add((state.state_id, teacher))
        return answer(teacher, ADD, COST)


async def ask_all(
    teacher_client: TeacherClient, states: int, n: int = 1
) -> list[list[TeacherReply]]:
    return list(await asyncio.gather(*(teacher_client.query(state(i), n) for i in range(states))))


async def test_money_that_is_set_aside_is_waited_for() -> None:
    till = Till()
    replies = await ask_all(TeacherClient(till, 64, REST_S), 20)
    assert all(isinstance(reply, TeacherAnswer) for (reply,) in replies)
    assert till.spent == 20 * COST


async def test_money_that_is_spent_is_not_waited_for() -> None:
    till = Till()
    replies = await ask_all(TeacherClient(till, 64, REST_S), 100)
    short = [is_short(each) for each in replies]
    assert till.spent + BOUND > CEILING
    assert short.count(False) == till.spent // COST == 21


async def test_an_answer_is_kept_while_another_teacher_waits_for_money() -> None:
    till = Till(ceiling=250)
    teacher_client = TeacherClient(till, 8, REST_S)
    (replies,) = await ask_all(teacher_client, 1, n=3)
    assert [reply.usd for reply in replies] == [COST, COST, COST]
    assert till.spent == 3 * COST


async def test_no_more_states_are_asked_about_at_once_than_allowed() -> None:
    till = Till(ceiling=10**6)
    await ask_all(TeacherClient(till, 3, REST_S), 20)
    assert till.most == 3


async def test_a_stopped_desk_answers_what_is_under_way_and_asks_nothing_new() -> None:
    till = Till(ceiling=10**6)
    till.gate.clear()
    teacher_client = TeacherClient(till, 2, REST_S)
    tasks = [asyncio.create_task(teacher_client.query(state(i), 1)) for i in range(5)]
    await asyncio.sleep(0)
    teacher_client.stop()
    till.gate.set()
    await teacher_client.idle()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, Stopped) for result in results] == [False, False, True, True, True]
    assert till.calls == 2


async def test_a_state_that_waits_for_money_gives_up_after_the_answers_under_way() -> None:
    till = Till(ceiling=BOUND)
    till.gate.clear()
    teacher_client = TeacherClient(till, 2, REST_S)
    under_way, waiting = (asyncio.create_task(teacher_client.query(state(i), 1)) for i in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    teacher_client.stop()
    assert (under_way.done(), waiting.done()) == (False, False)
    till.gate.set()
    with pytest.raises(Stopped):
        await waiting
    assert isinstance(under_way.result()[0], TeacherAnswer)


async def test_a_cancelled_question_does_not_keep_others_waiting() -> None:
    till = Till(ceiling=BOUND)
    till.gate.clear()
    teacher_client = TeacherClient(till, 2, REST_S)
    first, second = (asyncio.create_task(teacher_client.query(state(i), 1)) for i in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert is_short(await second)


class Ill:
    """Teacher a answers; teacher b is suspended so many times, at first for a reason."""

    def __init__(self, refusals: int, reason: FailureKind = FailureKind.SERVER) -> None:
        self.refusals, self.reason, self.calls = refusals, reason, 0

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.calls += 1
        first = self.calls == 1
        await asyncio.sleep(0)
        if self.refusals > 0:
            self.refusals -= 1
            kind = self.reason if first else FailureKind.SUSPENDED
            return [answer("a", ADD), failure("b", kind)]
        return [answer("a", ADD), answer("b", ADD)]


async def test_a_teacher_that_is_left_alone_is_waited_for() -> None:
    replies = await ask_all(TeacherClient(Ill(refusals=4), 4, REST_S), 4, n=2)
    kinds = [isinstance(each[1], TeacherAnswer) for each in replies]
    assert kinds == [False, True, True, True]  # the first one failed, and was not suspended


async def test_a_teacher_that_never_comes_back_is_given_up_for_all_states() -> None:
    ill = Ill(refusals=10**9)
    teacher_client = TeacherClient(ill, 1, REST_S)
    replies = await ask_all(teacher_client, 50, n=2)
    assert not any(isinstance(each[1], TeacherAnswer) for each in replies)
    assert ill.calls == 50 + RESTS


@pytest.mark.parametrize("reason", [FailureKind.AUTH, FailureKind.PAYMENT])
async def test_a_teacher_that_only_a_person_can_repair_is_not_waited_for(
    reason: FailureKind,
) -> None:
    ill = Ill(10**9, reason)
    await ask_all(TeacherClient(ill, 1, rest_s=3600.0), 10, n=2)
    assert ill.calls == 10


async def test_a_stopped_desk_waits_for_no_rest() -> None:
    teacher_client = TeacherClient(Ill(refusals=10**9), 1, rest_s=3600.0)
    await teacher_client.query(state(0), 2)
    waiting = asyncio.create_task(teacher_client.query(state(1), 2))
    for _ in range(5):
        await asyncio.sleep(0)
    teacher_client.stop()
    with pytest.raises(Stopped):
        await waiting


def test_a_second_round_replaces_failures_and_adds_what_they_cost() -> None:
    first = [answer("a", ADD, 0.5), failure("b", FailureKind.BUDGET), failure("c", usd=0.25)]
    again = [
        answer("a", ADD, 0.0, cached=True),
        answer("b", ADD, 0.5),
        answer("c", ADD, 0.5),
    ]
    joined = together(first, again)
    assert [(reply.usd, isinstance(reply, TeacherAnswer)) for reply in joined] == [
        (0.5, True), (0.5, True), (0.75, True),
    ]  # fmt: skip
    assert joined[0] is first[0]
