"""The workflows of the planner's package: who is trained, on what, and with which rewards."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from workflow_ports import SAMPLING, Ports

from composer_mesh import Episode, Outcome
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.tasks.loading import make_task, make_workflow
from composer_mesh.tasks.running import RunningEpisode

FOLDER = ROOT / "examples" / "planner"
CONFIGS = sorted(path for path in FOLDER.glob("*.toml") if path.name != "pyproject.toml")
Play = Callable[..., Any]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable."""
    monkeypatch.syspath_prepend(str(FOLDER))


class Scored(Ports):
    """Ports that score conversations as an environment does."""

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        return await RunningEpisode(self.task, episode).outcome(messages)


@pytest.fixture
def play(tokenizer: Any) -> Play:
    """Play the training episode of a config's task whose numbers fit, by a script of answers."""

    async def played(name: str, count: int, answers: Callable[[list[int]], list[str]]) -> Trace:
        config = load_config(FOLDER / f"{name}.toml", [])
        task, workflow = make_task(config), make_workflow(config)
        assert workflow is not None
        index = next(
            n for n in range(50) if len(task.episode("train", n).payload["numbers"]) == count
        )
        script = answers(list(task.episode("train", index).payload["numbers"]))
        chat = ChatFormat(tokenizer, task.tools)
        ports = Scored(task, chat, lambda number: script[number])  # type: ignore[arg-type]
        player = WorkflowPlayer(workflow, ports, ports, chat, 60.0)
        sample = Sample(task.pick("train", index), 0, 0, SAMPLING)
        return (await player.play(sample, "train-000000-000")).trace

    return played


def plan(numbers: list[int]) -> str:
    return f"{numbers[0]}, {numbers[1]}; {numbers[2]}, {numbers[3]}"


async def test_a_planner_is_rewarded_for_its_answer_and_plan_and_workers_for_their_parts(
    play: Play,
) -> None:
    def answers(n: list[int]) -> list[str]:
        return [plan(n), str(max(n[:2])), "nothing", str(max(n))]

    trace = await play("config", 4, answers)
    assert [one.role for one in trace.trajectories()] == ["planner", "worker", "worker"]
    assert [one.reward for one in trace.trajectories()] == [1.2, 1.0, 0.0]
    assert (trace.turn_rewards, trace.success) == ([0.2, 0.0], True)


async def test_a_plan_without_pairs_has_no_workers_and_no_reward(play: Play) -> None:
    trace = await play("config", 4, lambda n: ["no plan", "1000"])
    assert (trace.others, trace.reward, trace.success) == ([], 0.0, False)
    assert trace.messages[2]["content"] == "error: write two pairs"


async def test_a_question_of_two_numbers_goes_to_a_worker(play: Play) -> None:
    trace = await play("config", 2, lambda n: [str(max(n))])
    assert (trace.role, trace.reward, trace.others) == ("worker", 1.0, [])


@pytest.mark.parametrize(("sampled", "greedy"), [(True, False), (False, True), (True, True)])
async def test_the_greedy_answer_is_the_baseline_and_is_not_trained(
    play: Play, sampled: bool, greedy: bool
) -> None:
    def answers(n: list[int]) -> list[str]:
        return [str(max(n)) if right else "x" for right in (sampled, greedy)]

    trace = await play("remax", 3, answers)
    assert (trace.reward, trace.advantage) == (float(sampled), float(sampled) - float(greedy))
    assert len(trace.trajectories()) == 1


async def test_only_the_second_answer_of_a_self_critique_is_trained_and_counts(
    play: Play,
) -> None:
    trace = await play("self_critique", 3, lambda n: ["x", str(max(n))])
    assert [turn.trained for turn in trace.turns] == [False, True]
    assert (trace.reward, trace.success) == (1.0, True)
    assert trace.messages[2]["content"] == "Is that right? Answer again."


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_readme_states_what_each_config_has_learned(path: Path) -> None:
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_experts_of_all_tasks_succeed() -> None:
    from composer_mesh import SyncSession

    tasks: Any = importlib.import_module("planner.tasks")
    for kind in (tasks.Largest, tasks.LargestInTwo, tasks.LargestByPlan):
        task = kind.create()
        for index in range(20):
            with SyncSession(task, task.episode("train", index)) as session:
                while not session.step(task.expert(session.messages)).done:
                    pass
                assert session.outcome().success
