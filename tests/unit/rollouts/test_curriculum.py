"""The order of episodes: by measured success, repeatable, and no episode left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from composer_mesh.configs.data import CurriculumConfig
from composer_mesh.rollouts.curriculum import Curriculum, EpisodeOrder, GroupResult, TaskSource
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.loading import TaskMixture
from composer_mesh.tasks.toolbox import ToolboxTask

CONFIG = CurriculumConfig(low=0.25, high=0.75, explore=0.25)
SIZE, PROMPTS = 4, 4
Success = Callable[[int, int], float]


class OneTask:
    """The episodes of a single task."""

    def locate(self, index: int) -> tuple[str, int]:
        return "one", index

    def index_of(self, _task: str, own: int) -> int:
        return own


def curriculum(config: CurriculumConfig = CONFIG, size: int | None = None) -> Curriculum:
    return Curriculum(config, 7, [TaskSource("one", size=size)], OneTask())


def traces(group_id: int, episode: int, successes: int, samples: int = SIZE) -> list[Trace]:
    rewards = [number < successes for number in range(samples)]
    return [
        Trace(f"{group_id}-{n}", group_id, n, "one", "train", episode, [], [], won, won, [])
        for n, won in enumerate(rewards)
    ]


def play(
    order: Curriculum, steps: range, success: Success, lag: int = 0
) -> list[tuple[GroupResult, ...]]:
    """Steps of PROMPTS groups, each entering `lag` versions before its step."""
    found = []
    for step in steps:
        groups = range(step * PROMPTS, (step + 1) * PROMPTS)
        episodes = {group: order.choose(group, max(0, step - lag)) for group in groups}
        played = [
            (n, traces(n, episode, round(SIZE * success(episode, step))))
            for n, episode in episodes.items()
        ]
        found.append(order.results(played))
        order.settle(step, found[-1])
    return found


def of_difficulty(episode: int, _step: int) -> float:
    """Every third episode is sometimes solved; the others always, or never."""
    return (0.5, 0.0, 1.0)[episode % 3]


def test_in_order_group_i_plays_episode_i() -> None:
    order = EpisodeOrder()
    assert [order.choose(group, 3) for group in range(5)] == list(range(5))
    assert order.results([(0, [])]) == ()
    assert order.figures(()) == {}


def test_episodes_in_the_band_are_played_again_and_others_are_not() -> None:
    counts = Counter(
        one.episode for results in play(curriculum(), range(40), of_difficulty) for one in results
    )
    assert all(count == 1 for episode, count in counts.items() if episode % 3)
    again = [count for episode, count in counts.items() if episode % 3 == 0]
    assert sum(again) > 2 * len(again)


@given(st.integers(0, 2**16), st.sampled_from([0, 1, 3]))
def test_new_episodes_come_in_order_and_none_is_left_out(seed: int, lag: int) -> None:
    def success(episode: int, step: int) -> float:
        return random.Random(f"{seed}-{episode}-{step}").random()

    played = [one for step in play(curriculum(), range(15), success, lag) for one in step]
    first = list(dict.fromkeys(one.episode for one in played))
    assert first == list(range(len(first)))


def test_a_share_of_the_groups_plays_new_episodes_whatever_is_known() -> None:
    steps = play(curriculum(), range(200), lambda *_: 0.5)
    known, every = (
        len({one.episode for results in some for one in results}) for some in (steps[:20], steps)
    )
    assert 0.2 < (every - known) / (180 * PROMPTS) < 0.3


def test_no_episode_is_under_way_twice() -> None:
    for lag in (0, 2):
        steps = play(curriculum(), range(40), lambda *_: 0.5, lag)
        for start in range(40 - lag):
            together = [one.episode for step in steps[start : start + lag + 1] for one in step]
            assert len(set(together)) == len(together)


def test_the_episode_that_was_played_longest_ago_comes_first() -> None:
    order = curriculum(CONFIG.model_copy(update={"explore": 1e-9}))
    steps = play(order, range(8), lambda episode, _: 0.5 if episode < 8 else 0.0)
    # The first two steps find nothing measured that is free, so they play what is new.
    assert [one.episode for one in steps[0]] == [0, 1, 2, 3]
    assert [one.episode for one in steps[2]] == [one.episode for one in steps[1]]


def test_an_episode_leaves_the_band_when_it_is_learned() -> None:
    steps = play(curriculum(), range(30), lambda _, step: 0.5 if step < 10 else 1.0)
    late = [one.episode for step in steps[20:] for one in step]
    assert len(set(late)) == len(late)


def test_rows_of_a_finite_task_are_known_by_their_number_when_they_come_again() -> None:
    order = curriculum(size=6)
    steps = play(order, range(10), lambda episode, _: 0.5 if episode % 6 == 1 else 0.0)
    assert order.figures(steps[-1])["curriculum/episodes"] == 6
    counts = Counter(one.episode % 6 for step in steps for one in step)
    assert counts[1] == max(counts.values())


def test_a_choice_depends_on_the_steps_before_its_version_alone() -> None:
    early, late = curriculum(), curriculum()
    for order in (early, late):
        play(order, range(4), of_difficulty)
    results = tuple(GroupResult(16 + n, 90 + n, 2, SIZE) for n in range(4))
    late.settle(4, results)
    for group, one in zip(range(16, 20), results, strict=True):
        early.restore(group, one.episode)
    assert [early.choose(n, 4) for n in range(20, 24)] == [late.choose(n, 4) for n in range(20, 24)]


@given(st.integers(0, 12), st.sampled_from([0, 1]), st.sets(st.integers(0, PROMPTS - 1)))
def test_a_resumed_run_chooses_what_the_whole_run_does(
    stopped: int, lag: int, finished: set[int]
) -> None:
    """Some groups of the step under way were stored, the others are chosen anew."""
    whole = play(curriculum(), range(14), of_difficulty, lag)
    order = curriculum()
    for step, results in enumerate(whole[:stopped]):
        order.settle(step, results)
    for number in finished:
        one = whole[stopped][number]
        order.restore(one.group_id, one.episode)
    assert play(order, range(stopped, 14), of_difficulty, lag) == whole[stopped:]


def test_a_group_of_which_nothing_was_played_measures_nothing() -> None:
    order = curriculum()
    order.choose(0, 0)
    results = order.results([(0, [])])
    order.settle(0, results)
    order.choose(1, 1)
    assert results == (GroupResult(0, 0, 0, 0),)
    assert order.figures(results)["curriculum/band_episodes"] == 0


def test_figures_are_shares_of_the_steps_groups() -> None:
    order = curriculum()
    (results,) = play(order, range(1), of_difficulty)
    assert order.figures(results) == {
        "curriculum/new": 1.0,
        "curriculum/in_band": 0.5,
        "curriculum/band_episodes": 0,
        "curriculum/episodes": 4,
    }


class Second(ToolboxTask):
    name = "second"


def mixed(config: CurriculumConfig = CONFIG) -> tuple[Curriculum, TaskMixture]:
    mixture = TaskMixture([ToolboxTask.create(), Second.create()], [1.0, 1.0])
    sources = [TaskSource("toolbox", 1.0), TaskSource("second", 1.0)]
    return Curriculum(config, 7, sources, mixture), mixture


def shares(steps: Sequence[Sequence[GroupResult]], mixture: TaskMixture) -> Counter[str]:
    return Counter(mixture.locate(one.episode)[0] for step in steps for one in step)


def test_a_task_in_the_band_is_drawn_more_often_than_one_that_is_solved() -> None:
    order, mixture = mixed()
    steps = play(
        order,
        range(100),
        lambda episode, _: 0.5 if mixture.locate(episode)[0] == "toolbox" else 1.0,
    )
    late = shares(steps[50:], mixture)
    # The solved task keeps the floor: its weight times `explore`.
    assert 0.1 < late["second"] / late.total() < 0.3
    figures = order.figures(steps[-1])
    assert figures["curriculum/weight/second"] == pytest.approx(0.2)
    assert figures["curriculum/success/second"] == 1.0


def test_each_tasks_own_episodes_come_in_order_in_a_mixture_too() -> None:
    order, mixture = mixed()
    steps = play(order, range(30), of_difficulty)
    played: dict[str, list[int]] = {"toolbox": [], "second": []}
    for one in (one for step in steps for one in step):
        task, own = mixture.locate(one.episode)
        assert mixture.index_of(task, own) == one.episode
        played[task].append(own)
    for own in played.values():
        first = list(dict.fromkeys(own))
        assert first == list(range(len(first)))


@pytest.mark.parametrize(
    ("success", "fit"), [(0.0, 0.0), (0.1, 0.4), (0.25, 1.0), (0.75, 1.0), (0.9, 0.4), (1.0, 0.0)]
)
def test_a_tasks_weight_falls_on_both_sides_of_the_band(success: float, fit: float) -> None:
    assert CONFIG.fit(success) == pytest.approx(fit)


@pytest.mark.parametrize(
    "section", [{"low": 0.5, "high": 0.4}, {"explore": 0.0}, {"window": 0}, {"low": -0.1}]
)
def test_a_band_or_share_that_chooses_nothing_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CurriculumConfig(**section)


def test_a_trace_says_whether_it_was_a_success() -> None:
    order = curriculum()
    order.choose(0, 0)
    first, *rest = traces(0, 0, 2)
    assert order.results([(0, [replace(first, success=False), *rest])])[0].successes == 1


def test_islands_share_new_episodes_and_none_is_left_out() -> None:
    islands = [
        Curriculum(CONFIG, 7, [TaskSource("one")], OneTask(), first=rank, every=3)
        for rank in range(3)
    ]
    played = [
        [one.episode for results in play(order, range(20), of_difficulty) for one in results]
        for order in islands
    ]
    for rank, episodes in enumerate(played):
        assert {episode % 3 for episode in episodes} == {rank}
        assert sorted(set(episodes)) == list(range(rank, max(episodes) + 1, 3))
    assert len(set(played[0])) < len(played[0]), "no episode in the band was played again"
    assert len({tuple(n // 3 for n in episodes) for episodes in played}) > 1, "all draw the same"


def test_an_island_that_resumes_goes_on_with_its_share() -> None:
    def fresh() -> Curriculum:
        return Curriculum(CONFIG, 7, [TaskSource("one", size=30)], OneTask(), first=1, every=2)

    through, before = fresh(), fresh()
    expected = play(through, range(12), of_difficulty)
    early = play(before, range(6), of_difficulty)
    after = fresh()
    for step, results in enumerate(early):
        after.settle(step, results)
    assert play(after, range(6, 12), of_difficulty) == expected[6:]
