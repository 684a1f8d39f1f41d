"""The order of a run's episodes: made from its config, task and what it has stored."""

from __future__ import annotations

import random
from typing import Any

import pytest

from composer_mesh import Row, Task
from composer_mesh.rollouts.curriculum import Curriculum, EpisodeOrder, GroupResult
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.services.run.parts import make_episode_order
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.services.schedule.groups import StoredGroup
from composer_mesh.tasks.errors import TaskCodeError

BAND: dict[str, Any] = {"curriculum": {"low": 0.4, "high": 0.6, "explore": 1e-9}}


class Rows(Task):
    """A task of three rows."""

    def rows(self, split: Split) -> list[Row] | None:
        return [{"n": n} for n in range(3)]


class Faulty(Task):
    def rows(self, split: Split) -> list[Row] | None:
        raise KeyError("mine")


class Made(Task):
    def generate(self, rng: random.Random) -> Row:
        return {"n": rng.random()}


def stored(group_id: int, episode: int) -> StoredGroup:
    trace = Trace("a", group_id, 0, "rows", "train", episode, [], [], 0.0, False, [])
    return StoredGroup([trace])


def test_without_a_curriculum_episodes_are_played_in_order(build_config: Any) -> None:
    assert type(make_episode_order(build_config(), Faulty(), ResumeContents())) is EpisodeOrder


def test_a_run_goes_on_with_what_its_steps_have_measured_and_its_waiting_groups_play(
    build_config: Any,
) -> None:
    results = (GroupResult(0, 0, 0, 2), GroupResult(1, 1, 1, 2))
    past = ResumeContents(steps=1, results=[(0, results)], waiting={3: stored(3, 2)})
    order = make_episode_order(build_config(data=BAND), Made(), past)
    assert isinstance(order, Curriculum)
    # Episode 1 is in the band, 2 is that of a stored group, and 3 is the next new one.
    assert [order.choose(group, 1) for group in (2, 3, 4)] == [1, 2, 3]


def test_the_rows_of_a_finite_task_are_counted(build_config: Any) -> None:
    results = tuple(GroupResult(n, n, 1 if n == 4 else 0, 2) for n in range(5))
    past = ResumeContents(steps=1, results=[(0, results)])
    order = make_episode_order(build_config(data=BAND), Rows(), past)
    assert order.figures(results)["curriculum/episodes"] == 3
    assert order.choose(5, 1) == 4


def test_rows_that_raise_are_an_error_with_the_line(build_config: Any) -> None:
    with pytest.raises(TaskCodeError, match=r"test_episode_order\.py:\d+: KeyError: 'mine'"):
        make_episode_order(build_config(data=BAND), Faulty(), ResumeContents())


def test_islands_with_a_curriculum_start_from_different_episodes(build_config: Any) -> None:
    orders = [
        make_episode_order(
            build_config(
                data=BAND, islands={"store": "file:///shared/x", "rank": rank, "world_size": 2}
            ),
            Made(),
            ResumeContents(),
        )
        for rank in range(2)
    ]
    assert [[order.choose(group, 0) for group in range(3)] for order in orders] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
