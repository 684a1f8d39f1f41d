"""Judges before a run, and in commands that need no mesh."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scripted_provider import ScriptedProvider, answer

from composer_mesh import JudgesSpent, Row, Task, Transcript, reward
from composer_mesh.configs.schema import Config
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.services.checks.keys import MissingKey, check_keys, key_variables
from composer_mesh.services.checks.local_judges import local_judges
from composer_mesh.services.checks.task import describe_task

JUDGE = {
    "name": "quality",
    "base_url": "http://judge.test/v1",
    "model": "m",
    "prompt_usd_per_million": 1.0,
    "completion_usd_per_million": 2.0,
}


class Story(Task):
    """A task whose reward asks a judge."""

    def generate(self, rng: random.Random) -> Row:
        return {"topic": rng.randint(0, 10**9)}

    def prompt(self, row: Row) -> str:
        return f"Write about {row['topic']}."

    @reward
    async def good(self, transcript: Transcript) -> float:
        return (await self.judge("quality").score("Good?", transcript)).value


@pytest.fixture
def build(build_config: Any, tmp_path: Path) -> Any:
    def config(usd: float = 1.0, **judge: Any) -> Config:
        cache = {"cache": str(tmp_path / "answers.sqlite"), "attempts": 1}
        judges = {"models": [JUDGE | judge], "budget": {"usd": usd}, **cache}
        built: Config = build_config(judges=judges, replay={"beta": 0.0})
        return built

    return config


def test_a_judge_without_its_key_a_price_or_an_address_is_refused_before_anything_starts(
    build: Any,
) -> None:
    keyed = build(api_key_env="JUDGE_KEY")
    with pytest.raises(MissingKey, match="judge 'quality' takes its key from"):
        check_keys(keyed, {})
    check_keys(keyed, {"JUDGE_KEY": "sk"})
    assert key_variables(keyed, "judge") == ["JUDGE_KEY"]
    assert key_variables(keyed, "environment") == []
    for wrong, words in (
        ({"base_url": "judge.test"}, "must begin with http"),
        ({"prompt_usd_per_million": None, "completion_usd_per_million": None}, "has no price"),
        ({"usd": 0.0}, "could never be queried: set judges.budget.usd"),
    ):
        with pytest.raises(ValidationError, match=words):
            build(**wrong)


def test_judges_have_actors_of_their_own_in_the_plan(build: Any) -> None:
    plan = plan_mesh(build())
    (row,) = [row for row in plan.actors if row.kind == "judge"]
    assert row.names == ("judge-0",)
    assert ("environment", ("judge",)) in [(one.source, one.targets) for one in plan.transports]


def test_a_check_asks_no_judge_and_says_so(build: Any) -> None:
    told = list(describe_task(build(), Story.create()))
    assert "task 'story': judge quality was not called, its answers are examples" in told


def test_a_command_asks_judges_in_its_own_process_within_the_ceiling(
    build: Any, tmp_path: Path
) -> None:
    provider = ScriptedProvider(say=lambda _: answer('{"reason": "r", "score": 0.5}', 0.0001))
    task = Story.create()
    with local_judges(build(), task, tmp_path, provider.transport):
        found = [asyncio.run(task.judge("quality").score("Good?", "text")) for _ in range(2)]
    assert [(one.value, one.usd) for one in found] == [(0.5, 0.0001), (0.5, 0.0)]
    with (
        local_judges(build(usd=1e-9), task, tmp_path, provider.transport),
        pytest.raises(JudgesSpent, match=r"raise judges\.budget\.usd"),
    ):
        asyncio.run(task.judge("quality").score("Bad?", "text"))
    assert len(provider.requests) == 1
