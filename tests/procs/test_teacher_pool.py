"""Teachers in processes of their own, queried by scripts and by notebooks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gated_provider import COST, GatedProvider
from guides import Guide

from composer_mesh import TeacherAnswer, TeacherFailure, TeacherPool
from composer_mesh.mesh.processes import is_alive
from composer_mesh.rollouts.pairs import FailureKind


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def teachers(provider: GatedProvider, *names: str) -> list[dict[str, Any]]:
    about = {"kind": "openai", "base_url": provider.base_url, "model": "m"}
    prices = {"prompt_usd_per_million": 0, "completion_usd_per_million": 0, "usd_per_request": COST}
    return [{"name": name, **about, **prices} for name in names]


def pids(pool: TeacherPool) -> list[int]:
    assert pool._service is not None
    return [line["pid"] for line in pool._service.status()]


async def test_a_pool_answers_within_a_loop_and_without_one_and_leaves_no_process() -> None:
    async with GatedProvider() as provider:
        provider.gate.set()
        async with TeacherPool(teachers(provider, "a", "b"), 1.0, n=2) as pool:
            first = await pool.query(messages("one"))
            assert [reply.teacher for reply in first] == ["a", "b"]
            assert all(isinstance(reply, TeacherAnswer) for reply in first)
            many = [pool.query(messages(f"{n}"), n=1) for n in range(4)]
            assert [len(each) for each in await asyncio.gather(*many)] == [1] * 4
            (again, _) = await asyncio.to_thread(pool.query_sync, messages("one"))
            assert isinstance(again, TeacherAnswer)
            assert again.action_text == "Answer: one"
            requests = round(await pool.spent_usd() / COST)
            assert requests == len(provider.requests) in range(6, 9)
            alive = pids(pool)
            assert len(alive) == 2
        assert not any(map(is_alive, alive))


async def test_a_budget_holds_over_all_processes_and_in_a_folder(tmp_path: Path) -> None:
    async with GatedProvider() as provider:
        provider.gate.set()
        few = 2.5 * COST
        options: Any = {"n": 2, "folder": tmp_path, "overrides": ["replay.attempts=1"]}
        async with TeacherPool(teachers(provider, "a"), few, **options) as pool:
            asked = [pool.query(messages(f"{n}"), n=1) for n in range(6)]
            replies = [reply for each in await asyncio.gather(*asked) for reply in each]
        failed = [reply for reply in replies if isinstance(reply, TeacherFailure)]
        assert {reply.kind for reply in failed} == {FailureKind.BUDGET}
        assert 0 < len(provider.requests) < 6


async def test_the_pool_of_the_guide_answers() -> None:
    (block,) = (one for one in Guide.read("replay.md").blocks("python") if "TeacherPool" in one)
    async with GatedProvider() as provider:
        provider.gate.set()
        names: dict[str, Any] = {"teachers": teachers(provider, "cold", "warm")}
        await asyncio.to_thread(exec, block, names)
    assert [reply.teacher for reply in names["replies"]] == ["cold", "warm"]
