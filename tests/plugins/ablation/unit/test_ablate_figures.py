"""Figures over seeds: the quantile is Student's, no interval is too narrow, "never" comes last."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.plugins.ablation.figures import (
    curve,
    mean_over_run,
    mean_over_seeds,
    median_steps,
    paired,
    steps_to,
    success_over_seeds,
    t_quantile,
)
from composer_mesh.services.directory.report import Evaluation, wilson_interval

EPISODES = 50
shares = st.integers(0, EPISODES).map(lambda wins: wins / EPISODES)


def upper_tail(value: float, degrees: int) -> float:
    """P(T > value) of Student's distribution, by Simpson's rule over the density from 0."""
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log_scale) / math.sqrt(degrees * math.pi)
    count = 4000
    width = value / count
    total = 0.0
    for place in range(count + 1):
        weight = 1 if place in (0, count) else 4 if place % 2 else 2
        total += weight * (1 + (place * width) ** 2 / degrees) ** (-(degrees + 1) / 2)
    return 0.5 - scale * total * width / 3


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 11, 12, 20, 50, 200])
def test_beyond_the_quantile_lies_a_fortieth_of_students_distribution(degrees: int) -> None:
    assert upper_tail(t_quantile(degrees), degrees) == pytest.approx(0.025, abs=1e-5)


def test_a_quantile_without_degrees_of_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        t_quantile(0)


def test_three_seeds_give_the_interval_of_a_textbook() -> None:
    estimate = mean_over_seeds([0.6, 0.7, 0.8])
    assert estimate is not None
    assert estimate.mean == pytest.approx(0.7)
    assert estimate.high - estimate.mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert mean_over_seeds([0.6]) is None


@given(st.lists(shares, min_size=1, max_size=6))
def test_the_interval_holds_the_mean_and_is_never_narrower_than_wilsons(
    successes: list[float],
) -> None:
    estimate = success_over_seeds([Evaluation(0, share, EPISODES) for share in successes])
    low, high = wilson_interval(estimate.mean, EPISODES * len(successes))
    assert 0 <= estimate.low <= low <= high <= estimate.high <= 1
    assert estimate.low <= estimate.mean <= estimate.high


def test_seeds_that_differ_widen_the_interval_beyond_the_episodes() -> None:
    alike = success_over_seeds([Evaluation(0, 0.5, 1000)] * 3)
    apart = success_over_seeds([Evaluation(0, share, 1000) for share in (0.3, 0.5, 0.7)])
    assert alike.mean == pytest.approx(apart.mean)
    assert apart.high - apart.low > 5 * (alike.high - alike.low)


def test_one_seed_has_the_interval_of_its_episodes() -> None:
    one = success_over_seeds([Evaluation(0, 0.5, 200)])
    assert (one.low, one.high) == wilson_interval(0.5, 200)


def test_a_curve_has_the_steps_that_all_seeds_have() -> None:
    runs = {
        0: [Evaluation(step, 0.5, 10) for step in (0, 2, 4)],
        1: [Evaluation(step, 0.7, 10) for step in (0, 4)],
    }
    points = curve(runs)
    assert [point.step for point in points] == [0, 4]
    assert [point.success.mean for point in points] == pytest.approx([0.6, 0.6])
    assert curve({}) == []


def test_the_target_is_reached_at_the_first_evaluation_that_shows_it() -> None:
    run = [Evaluation(step, share, 10) for step, share in ((0, 0.2), (5, 0.8), (10, 0.7))]
    assert steps_to(run, 0.8) == 5
    assert steps_to(run, 0.81) is None
    assert steps_to(run, 0.1) == 0


@pytest.mark.parametrize(
    ("steps", "median"),
    [
        ([10, 20, 60], 20),
        ([10, None, 20], 20),
        ([None, None, 20], None),
        ([10, None], None),
        ([10, 20], 15),
        ([], None),
    ],
)
def test_never_is_later_than_any_step(steps: list[int | None], median: float | None) -> None:
    assert median_steps(steps) == median


def test_the_mean_over_a_run_weighs_steps_and_not_evaluations() -> None:
    run = [Evaluation(step, share, 10) for step, share in ((0, 0.0), (2, 1.0), (10, 1.0))]
    assert mean_over_run(run) == pytest.approx(0.9)
    assert mean_over_run(run[:1]) == 0.0


def test_differences_are_those_of_the_seeds_that_both_have() -> None:
    assert paired({0: 0.5, 1: 0.75, 2: 1.0}, {2: 0.5, 0: 0.25}) == [0.25, 0.5]
