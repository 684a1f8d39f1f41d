"""Several tasks as one: shares by weight, no row lost or repeated, each with its own tools."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from composer_mesh import SyncSession, TaskSettings
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.schedule.metrics import success_of_tasks
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import TaskMixture, make_task
from composer_mesh.tasks.toolbox import ToolboxTask


class Second(ToolboxTask):
    """Another task with the same questions."""

    name = "second"


@pytest.fixture
def mixture() -> TaskMixture:
    settings = TaskSettings(seed=3)
    return TaskMixture([ToolboxTask.create(settings), Second.create(settings)], [3.0, 1.0])


def test_training_episodes_have_the_ratio_of_the_weights_at_every_moment(
    mixture: TaskMixture,
) -> None:
    picked = [mixture.pick("train", index).task for index in range(400)]
    for end in range(4, 401, 4):
        assert Counter(picked[:end])["second"] == end // 4
    again = [mixture.pick("train", index).task for index in reversed(range(400))]
    assert again[::-1] == picked


def test_an_episode_is_the_tasks_own_next_one_under_the_mixtures_index(
    mixture: TaskMixture,
) -> None:
    toolbox, second = mixture.parts
    found: dict[str, list[Any]] = {"toolbox": [], "second": []}
    for index in range(40):
        episode = mixture.episode("train", index)
        assert (episode.task, episode.index) == (mixture.pick("train", index).task, index)
        found[episode.task].append(episode.payload)
    assert found["toolbox"] == [toolbox.episode("train", i).payload for i in range(30)]
    assert found["second"] == [second.episode("train", i).payload for i in range(10)]


def test_held_out_episodes_are_taken_from_each_task_in_turn(mixture: TaskMixture) -> None:
    assert [mixture.episode("heldout", i).task for i in range(4)] == ["toolbox", "second"] * 2


def test_a_session_is_that_of_its_own_task(mixture: TaskMixture) -> None:
    episode = next(
        mixture.pick("train", i) for i in range(9) if mixture.pick("train", i).task == "second"
    )
    session = SyncSession(mixture, episode)
    while not session.step(mixture.expert(session.messages)).done:
        pass
    assert session.outcome().success


def test_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(UnusableTask, match="toolbox, toolbox: give each class its own name"):
        TaskMixture([ToolboxTask.create(), ToolboxTask.create()], [1.0, 1.0])


def test_a_config_mixes_tasks(build_config: Any, tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from composer_mesh.tasks.toolbox import ToolboxTask\n"
        "class Mine(ToolboxTask):\n    name = 'mine'\n"
    )
    mixed = [{"task": "toolbox"}, {"task": f"{file}:Mine", "weight": 2.0}]
    task = make_task(build_config(data={"mixture": mixed}))
    assert [one.name for one in task.parts] == ["toolbox", "mine"]
    assert Counter(task.pick("train", i).task for i in range(30)) == {"mine": 20, "toolbox": 10}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "task is not set"),
        ('task = "toolbox"\n[[data.mixture]]\ntask = "toolbox"', "together with mixture"),
        ('[[data.mixture]]\ntask = "toolbox"\nweight = 0', "weight"),
    ],
)
def test_a_mixture_is_one_way_to_name_tasks(data: str, said: str, tmp_path: Any) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[run]\nname = "small"\nsteps = 1\n[data]\n{data}\n')
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_success_is_told_by_task_where_there_are_several() -> None:
    def trace(task: str, success: bool) -> Trace:
        return Trace("a", 0, 0, task, "heldout", 0, [], [], float(success), success, [])

    assert success_of_tasks([trace("a", True)]) == {}
    found = success_of_tasks([trace("a", True), trace("b", True), trace("b", False)])
    assert found == {"a": (1.0, 1), "b": (0.5, 2)}
