"""Channel 3's outside half in real processes: an expert server and a pool that asks it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gated_provider import GatedProvider

from composer_mesh.actors.expert_server import ExpertServerActor
from composer_mesh.actors.experts.http import TOKEN_ENV, Expert, new_token
from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.panel_actors import TeacherReplayActor
from composer_mesh.actors.provider.endpoint import Keys, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderAuthError
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.rollouts.budget import BudgetRules, Prices, dollars, nano
from composer_mesh.rollouts.consensus import VoteOutcome, decide
from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
)
from composer_mesh.services import service
from composer_mesh.services.service import Service
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.playing import SyncSession

CONFIG = Config.model_validate(
    {"run": {"name": "t", "seed": 4, "steps": 1}, "data": {"task": "toolbox"}}
)
EXPERTS = [Expert("a", 0.0), Expert("b", 0.0), Expert("c", 0.0), Expert("wrong", 1.0)]
TASK = make_task(CONFIG)
TOKEN = new_token()
KEYS = Keys({TOKEN_ENV: TOKEN})


def state(index: int) -> FrozenState:
    opening = SyncSession(TASK, TASK.episode("train", index)).state(0)
    return FrozenState(f"state-{index}", opening, seed=index)


@pytest.fixture
async def run(host: MeshHost) -> AsyncIterator[tuple[SpawnedActor, Service, str]]:
    """A served panel, a pool of two that may ask it, and the address between them."""
    experts = await host.spawn("experts", ExpertServerActor)
    base_url = await experts.call("load", CONFIG, EXPERTS, TOKEN)
    pool = await service.spawn(TeacherReplayActor, n=2, host=host, name="replay")
    yield experts, pool, base_url
    await pool.fanout("aclose")
    await experts.call("aclose")


FREE = Prices.per_million(0, 0)


def teachers(base_url: str, *names: str) -> tuple[TeacherEndpoint, ...]:
    return tuple(TeacherEndpoint(name, base_url, name, TOKEN_ENV, prices=FREE) for name in names)


def settings(*asked: TeacherEndpoint) -> PanelSettings:
    return PanelSettings(asked, TASK.tools, Timeouts(total_s=120.0))


async def test_three_teachers_answer_and_a_wrong_student_makes_a_pair(run: Any) -> None:
    _, pool, base_url = run
    await pool.load(settings(*teachers(base_url, "a", "b", "c")), KEYS)
    states = [state(index) for index in range(8)]
    replies = await asyncio.gather(*(pool.query(s, n=3) for s in states))
    for asked, answers in zip(states, replies, strict=True):
        assert all(isinstance(answer, TeacherAnswer) for answer in answers)
        assert [answer.teacher for answer in answers] == ["a", "b", "c"]
        assert {answer.action_text for answer in answers} == {TASK.expert(asked.messages)}
        student = StudentState(asked, "t", 0, "Answer: -1", [1], [2], 0)
        decision = decide(student, answers, threshold=2)
        assert decision.outcome is VoteOutcome.PAIR
        assert decision.pair is not None
        assert decision.pair.chosen_text == TASK.expert(asked.messages)
    counts = [about["replies"] for about in await pool.fanout("describe")]
    assert sum(count["answered"] for count in counts) == 24


async def test_a_failing_teacher_is_a_counted_value_and_the_others_still_answer(run: Any) -> None:
    experts, pool, base_url = run
    nobody = TeacherEndpoint("nobody", base_url, "unserved", TOKEN_ENV, prices=FREE)
    await pool.load(settings(*teachers(base_url, "a", "wrong"), nobody), KEYS)
    first, second, third = await pool.on(0, "query", state(0), 3)
    right = TASK.expert(state(0).messages)
    assert (first.action_text == right, second.action_text == right) == (True, False)
    assert isinstance(third, TeacherFailure)
    assert (third.teacher, third.kind) == ("nobody", FailureKind.REQUEST)
    assert "'unserved' is not served" in third.text
    about = await pool.on(0, "describe")
    assert about["replies"] == {"answered": 2, "request": 1}
    assert (about["kind"], about["activity"]) == ("teacher_replay", "idle")
    await experts.call("aclose")
    assert (await experts.call("describe"))["base_url"] is None
    await pool.load(settings(*teachers(base_url, "a", "b")), KEYS)
    failed = await pool.on(0, "query", state(1), 2)
    assert [reply.kind for reply in failed] == [FailureKind.SERVER] * 2


async def test_n_chooses_teachers_by_the_states_seed_and_fairly(run: Any) -> None:
    _, pool, base_url = run
    await pool.load(settings(*teachers(base_url, "a", "b", "c")), KEYS)
    asked = [[r.teacher for r in await pool.query(state(index), n=2)] for index in range(3)]
    assert asked == [["a", "b"], ["b", "c"], ["a", "c"]]
    with pytest.raises(ValueError, match="n is 4, but 3 teachers are loaded"):
        await pool.query(state(0), n=4)


async def test_a_missing_key_is_found_by_load(host: MeshHost) -> None:
    pool = await service.spawn(TeacherReplayActor, n=1, host=host, name="replay")
    with pytest.raises(ProviderAuthError, match="NO_SUCH_KEY is not set"):
        await pool.load(
            settings(TeacherEndpoint("x", "https://x.test/v1", "m", "NO_SUCH_KEY")), KEYS
        )
    with pytest.raises(RuntimeError, match="the teacher_replay is not loaded: call load first"):
        await pool.query(state(0), n=1)
    await pool.aclose()


async def test_killing_a_replica_mid_query_loses_no_state_and_no_money(
    host: MeshHost, tmp_path: Path
) -> None:
    pool = await service.spawn(TeacherReplayActor, n=3, host=host, name="replay")
    states = [state(index) for index in range(12)]
    prices = Prices.per_million(0.1, 0.1)
    async with GatedProvider() as provider:
        asked = [TeacherEndpoint(n, provider.base_url, n, prices=prices) for n in "abc"]
        budget = BudgetRules(usd=0.1)
        paid = PanelSettings(
            tuple(asked), budget=budget, ledger=tmp_path / "ledger", cache=tmp_path / "cache"
        )
        await pool.load(paid, KEYS)
        asking = [asyncio.ensure_future(pool.query(one, n=3)) for one in states]
        await provider.has(36)
        os.kill(pool.replicas[0].actor.pid, signal.SIGKILL)
        await provider.has(48)  # the third that it was asked is asked again elsewhere
        provider.gate.set()
        replies = await asyncio.gather(*asking)
        assert all(isinstance(reply, TeacherAnswer) for three in replies for reply in three)
        again = await asyncio.gather(*(pool.query(one, n=3) for one in states))
        assert all(reply.cached for three in again for reply in three)
        assert len(provider.requests) == 48
        await pool.fanout("aclose")
        ledger = Ledger(tmp_path / "ledger", budget, paid.run)
        report = ledger.report()
        ledger.close()
    answered = sum(reply.usd for three in replies for reply in three)
    assert dollars(report.run.spent) == pytest.approx(answered)
    assert report.run.reserved > 0
    assert provider.charged <= report.run.spent + report.run.reserved <= nano(budget.usd)


async def test_neither_actor_loads_torch() -> None:
    modules = "composer_mesh.actors.panel_actors, composer_mesh.actors.expert_server"
    program = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await child.wait() == 0
