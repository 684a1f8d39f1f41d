"""An evaluation plays each held-out problem once, and its interval counts no trial twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from controller_world import World, finished
from repository import ROOT

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.cli import main
from composer_mesh.tasks.gsm8k import Gsm8kTask
from composer_mesh.tasks.loading import fewer_episodes, heldout_indices
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Fifteen questions, three of them held out."""
    rows = [
        {"question": f"What is {number} + 1?", "answer": f"<<{number}+1=1>>\n#### {number + 1}"}
        for number in range(15)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_problems_that_come_again_are_left_out(problems: Path) -> None:
    task = Gsm8kTask.create(TaskSettings(path=problems, heldout_every=5))
    assert task.episode("heldout", 3).payload == task.episode("heldout", 0).payload
    assert heldout_indices(task, 2) == [0, 1]
    assert heldout_indices(task, 200) == [0, 1, 2]


def test_a_task_that_makes_its_own_problems_has_as_many_as_are_asked_for(
    toolbox: ToolboxTask,
) -> None:
    assert heldout_indices(toolbox, 500) == list(range(500))
    assert fewer_episodes(range(500), 500) == ""


class Repeating(ToolboxTask):
    """A toolbox with three held-out problems."""

    def episode(self, split: Any, index: int) -> Any:
        return super().episode(split, index % 3 if split == "heldout" else index)


async def test_the_interval_of_an_evaluation_counts_each_problem_once(
    tokenizer: Any, build_config: Any
) -> None:
    task = Repeating.create(TaskSettings(seed=3))
    world = World(task, ChatFormat(tokenizer, task.tools))
    controller = await finished(world, build_config(eval={"episodes": 200}))
    assert [evaluation.episodes for evaluation in controller.evaluations] == [3, 3]
    low, high = controller.evaluations[0].interval
    assert (low, high) == pytest.approx((0.4385, 1.0), abs=1e-4)  # of three successes out of three


def test_check_says_that_there_are_fewer_held_out_episodes(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "configs" / "gsm8k.toml"
    said = "eval.episodes is {} but the data has 3 different held-out episodes"
    for episodes, told in ((3, False), (8, True)):
        settings = [f"data.path={problems}", f"eval.episodes={episodes}"]
        overrides = [part for one in settings for part in ("--set", one)]
        assert main(["check", str(config), *overrides]) == 0
        assert (said.format(episodes) in capsys.readouterr().out) == told
