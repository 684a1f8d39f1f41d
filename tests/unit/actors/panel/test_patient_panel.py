"""A patient panel waits for money that is only reserved, and for a teacher that is suspended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from scripted_provider import ENVIRON, ScriptedProvider, answer, state, teacher

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.provider.endpoint import RetryDelays, Timeouts
from composer_mesh.actors.provider.request_limiter import RESTS, BreakerRules
from composer_mesh.rollouts.budget import BudgetRules, dollars
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer, TeacherFailure, TeacherReply

COST, REST_S = 0.0001, 0.002


@asynccontextmanager
async def opened(provider: ScriptedProvider, **settings: Any) -> AsyncIterator[TeacherPanel]:
    defaults: dict[str, Any] = {
        "teachers": (teacher("a"),),
        "retries": RetryDelays(1),
        "timeouts": Timeouts(30.0, line_s=math.inf),
        "budget": BudgetRules(usd=1.0),
    }
    told = PanelSettings(**{**defaults, **settings})
    panel = await TeacherPanel.open(told, environ=ENVIRON, transport=provider.transport)
    try:
        yield panel
    finally:
        await panel.aclose()


async def ask_all(panel: TeacherPanel, states: int) -> list[TeacherReply]:
    asked = await asyncio.gather(*(panel.ask(state(number), 1) for number in range(states)))
    return [reply for (reply,) in asked]


async def bound() -> float:
    """What a request of a test reserves, in dollars."""
    provider = ScriptedProvider(COST)
    provider.gate.clear()
    async with opened(provider) as panel:
        asking = asyncio.create_task(panel.ask(state(0), 1))
        await provider.asked.wait()
        reserved = (await panel.report()).run.reserved
        provider.gate.set()
        await asking
    return dollars(reserved)


async def test_money_that_is_reserved_is_waited_for_and_money_that_is_spent_is_not() -> None:
    most = await bound()
    provider = ScriptedProvider(COST)
    async with opened(provider, budget=BudgetRules(usd=most + 20.5 * COST)) as panel:
        replies = await ask_all(panel, 100)
        spent = (await panel.report()).run.spent
    answered = [reply for reply in replies if isinstance(reply, TeacherAnswer)]
    assert len(answered) == len(provider.requests) == 21
    assert dollars(spent) == pytest.approx(21 * COST)
    kinds = {reply.kind for reply in replies if isinstance(reply, TeacherFailure)}
    assert kinds == {FailureKind.BUDGET}


async def test_a_cancelled_question_does_not_keep_others_waiting() -> None:
    provider = ScriptedProvider(COST)
    provider.gate.clear()
    async with opened(provider, budget=BudgetRules(usd=await bound())) as panel:
        asking = asyncio.create_task(panel.ask(state(0), 1))
        await provider.asked.wait()
        waiting = asyncio.create_task(panel.ask(state(1), 1))
        asking.cancel()
        provider.gate.set()
        (reply,) = await waiting
    assert isinstance(reply, TeacherFailure)
    assert reply.kind is FailureKind.BUDGET


async def test_nothing_is_waited_for_after_a_stop() -> None:
    provider = ScriptedProvider(COST)
    provider.gate.clear()
    async with opened(provider, budget=BudgetRules(usd=await bound())) as panel:
        asking = asyncio.create_task(panel.ask(state(0), 1))
        await provider.asked.wait()
        waiting = asyncio.create_task(panel.ask(state(1), 1))
        for _ in range(50):
            await asyncio.sleep(0)
        panel.stop_waiting()
        (reply,) = await waiting
        assert isinstance(reply, TeacherFailure)
        provider.gate.set()
        assert isinstance((await asking)[0], TeacherAnswer)
    assert len(provider.requests) == 1


def failing(status: int, times: float) -> Callable[[dict[str, Any]], httpx.Response]:
    """Fail so many requests, then answer."""
    left = [times]

    def say(_: dict[str, Any]) -> httpx.Response:
        left[0] -= 1
        if left[0] >= 0:
            return httpx.Response(status, json={"error": {"message": "no"}})
        return answer("Answer: 1", COST)

    return say


async def test_a_suspended_teacher_is_waited_for() -> None:
    provider = ScriptedProvider(say=failing(500, 2))
    rules = BreakerRules(failures=1, rest_s=REST_S)
    async with opened(provider, breaker=rules) as panel:
        replies = [(await panel.ask(state(number), 1))[0] for number in range(5)]
    assert [isinstance(reply, TeacherAnswer) for reply in replies] == [False, False, *[True] * 3]


async def test_a_teacher_that_never_comes_back_is_given_up() -> None:
    provider = ScriptedProvider(say=failing(500, math.inf))
    rules = BreakerRules(failures=1, rest_s=REST_S)
    async with opened(provider, breaker=rules) as panel:
        for number in range(RESTS + 1):
            await panel.ask(state(number), 1)
        kinds = {reply.kind for reply in await ask_all(panel, 50)}  # type: ignore[union-attr]
    # At most one request tries again when a rest is over; nobody waits for it.
    assert FailureKind.SUSPENDED in kinds <= {FailureKind.SUSPENDED, FailureKind.SERVER}
    assert RESTS + 1 <= len(provider.requests) <= RESTS + 2


@pytest.mark.parametrize("status", [401, 402])
async def test_a_teacher_that_only_a_person_can_repair_is_not_waited_for(status: int) -> None:
    provider = ScriptedProvider(say=failing(status, math.inf))
    rules = BreakerRules(failures=1, rest_s=3600.0)
    async with opened(provider, breaker=rules) as panel:
        replies = [(await panel.ask(state(number), 1))[0] for number in range(3)]
    kinds = [reply.kind for reply in replies]  # type: ignore[union-attr]
    assert kinds[1:] == [FailureKind.SUSPENDED] * 2
    assert len(provider.requests) == 1


async def test_a_suspension_is_not_waited_for_after_a_stop() -> None:
    provider = ScriptedProvider(say=failing(500, 1))
    rules = BreakerRules(failures=1, rest_s=3600.0)
    async with opened(provider, breaker=rules) as panel:
        (refused,) = await panel.ask(state(0), 1)
        assert isinstance(refused, TeacherFailure)
        assert refused.cause == "500"
        waiting = asyncio.create_task(panel.ask(state(1), 1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        panel.stop_waiting()
        (reply,) = await waiting
    assert isinstance(reply, TeacherFailure)
    assert (reply.kind, reply.cause) == (FailureKind.SUSPENDED, "suspended")
