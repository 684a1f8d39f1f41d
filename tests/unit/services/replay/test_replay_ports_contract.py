"""The ports `Teachers` and `Reference`: fakes, and services over the real actors, keep them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from controller_world import World
from in_process_host import InProcessHost
from monarch.actor import concurrent_endpoint
from scripted_provider import ENVIRON, ScriptedProvider, answer, teacher

from composer_mesh import SyncSession
from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.panel_actors import TeacherReplayActor
from composer_mesh.actors.provider.endpoint import RetryDelays
from composer_mesh.actors.reference import ReferenceActor
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import FrozenState, TeacherAnswer, TeacherFailure
from composer_mesh.services.steps.ports import Reference, Teachers
from composer_mesh.tasks.toolbox import ToolboxTask

NAMES = ("a", "b")


def refuses_b(body: dict[str, Any]) -> httpx.Response:
    """A provider one of whose models is down."""
    if body["model"] == "model-of-b":
        return httpx.Response(500, json={"error": {"message": "down"}})
    return answer("Answer: 4")


class ScriptedTeachers(TeacherReplayActor):
    """The real actor and panel, in front of a provider in this process."""

    @concurrent_endpoint
    async def load(self, refuses: bool) -> None:  # type: ignore[override]
        provider = ScriptedProvider(say=refuses_b if refuses else None)
        endpoints = tuple(map(teacher, NAMES))
        settings = PanelSettings(endpoints, retries=RetryDelays(1), budget=BudgetRules(usd=1.0))
        self._panel = await TeacherPanel.open(
            settings, environ=ENVIRON, transport=provider.transport
        )


@pytest.fixture(params=["fake", "TeacherReplayActor", "TeacherReplayActor with a failure"])
async def teachers(request: Any, toolbox: ToolboxTask, tokenizer: Any) -> AsyncIterator[Teachers]:
    if request.param == "fake":
        yield World(toolbox, ChatFormat(tokenizer, toolbox.tools))
        return
    pool: Any = await InProcessHost().serve(ScriptedTeachers)
    await pool.load("failure" in request.param)
    yield pool
    await pool.aclose()


@pytest.mark.parametrize("asked", [1, 2])
async def test_each_of_so_many_teachers_answers_or_fails_and_nothing_is_raised(
    teachers: Teachers, toolbox: ToolboxTask, asked: int
) -> None:
    messages = SyncSession(toolbox, toolbox.episode("train", 0)).messages
    replies = await teachers.query(FrozenState("train-000000-000/0", messages, 0), asked)
    assert [reply.teacher for reply in replies] == list(NAMES[:asked])
    assert all(isinstance(reply, TeacherAnswer | TeacherFailure) for reply in replies)
    assert all(reply.usd >= 0 for reply in replies)
    for reply in replies:
        if isinstance(reply, TeacherAnswer):
            assert reply.action_text


@pytest.fixture(params=["fake", "ReferenceActor"])
async def reference(
    request: Any, toolbox: ToolboxTask, tokenizer: Any, build_config: Any, policy_folder: Path
) -> Reference:
    if request.param == "fake":
        return World(toolbox, ChatFormat(tokenizer, toolbox.tools))
    pool: Any = await InProcessHost().serve(ReferenceActor)
    await pool.load(build_config(), policy_folder)
    return pool  # type: ignore[no-any-return]


def sample(number: int) -> PairSample:
    return PairSample(f"p{number}", [5, 6 + number], [7, 8, 9 + number], [10 + number])


async def test_each_pair_has_the_scores_of_its_two_answers_in_order(reference: Reference) -> None:
    samples = [sample(number) for number in range(3)]
    scores = await reference.score(samples)
    assert len(scores) == 3
    assert all(chosen < 0 and rejected < 0 for chosen, rejected in scores)
    backwards = await reference.score(samples[::-1])
    for score, same in zip(scores, backwards[::-1], strict=True):
        assert score == pytest.approx(same, abs=1e-4)


async def test_no_pairs_have_no_scores(reference: Reference) -> None:
    assert await reference.score([]) == []
