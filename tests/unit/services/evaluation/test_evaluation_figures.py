"""The figures of an evaluation: pass@k without bias, intervals in which repeats are no trials."""

from __future__ import annotations

from itertools import combinations

import pytest

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import wilson_interval
from composer_mesh.services.evaluation.report import figures_by_task, pass_at_k


def trace(index: int, sample: int, success: bool, task: str = "t", **rewards: float) -> Trace:
    spoken = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return Trace(
        *(f"heldout-{index:06d}-{sample:03d}", index, sample, task, "heldout", index, [], spoken),
        *(float(success), success, [], rewards),
    )


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            chosen = [any(one) for one in combinations(outcomes, k)]
            share = sum(chosen) / len(chosen)
            assert pass_at_k(samples, successes, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k} but there are 3 samples"):
        pass_at_k(3, 1, k)


def test_repeats_of_the_same_results_leave_every_interval_as_it_is() -> None:
    results = [True, False, True, True, False, True, True]
    (once,), (often,) = (
        figures_by_task([trace(i, n, one) for i, one in enumerate(results) for n in range(samples)])
        for samples in (1, 16)
    )
    assert once.success.interval == often.success.interval == wilson_interval(5 / 7, 7)
    assert once.success.mean == often.success.mean == often.pass_at[16].mean
    assert (often.episodes, often.samples) == (7, 112)


def test_an_episode_counts_once_however_many_of_its_samples_were_given_up() -> None:
    traces = [trace(0, 0, True), *(trace(1, n, False) for n in range(4))]
    (found,) = figures_by_task(traces)
    assert found.success.mean == 0.5
    assert found.pass_at[4].episodes == 1
    assert list(found.pass_at) == [1, 2, 4]


def test_tasks_are_counted_apart_with_their_own_rewards() -> None:
    traces = [trace(0, 0, True, "b", x=1.0), trace(1, 0, False, "b", x=0.5), trace(0, 0, True, "a")]
    a, b = figures_by_task(traces)
    assert (a.task, a.episodes, a.rewards) == ("a", 1, {})
    assert (b.task, b.episodes, b.rewards, b.turns) == ("b", 2, {"x": 0.75}, 1.0)
