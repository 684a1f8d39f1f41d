"""Group advantages against the statistics module and their invariants."""

import statistics
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.losses.advantages import group_advantages

rewards_of_a_group = st.lists(st.floats(-2, 2), min_size=2, max_size=8)


@settings(deadline=None)
@given(rewards_of_a_group)
def test_the_group_s_scale_is_the_unbiased_deviation_plus_epsilon(rewards: list[float]) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 1e-4)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + 1e-4) for r in rewards]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(rewards_of_a_group)
def test_without_a_scale_rewards_are_only_centred(rewards: list[float]) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), scale="none")
    mean = statistics.fmean(rewards)
    assert found.tolist() == pytest.approx([r - mean for r in rewards], abs=1e-12)


@settings(deadline=None)
@given(reward=st.floats(-10, 10, width=32), size=st.integers(1, 9))
def test_equal_rewards_and_a_group_of_one_get_exactly_zero(reward: float, size: int) -> None:
    for scale in ("group", "none"):
        for eps in (1e-4, 0.0):
            found = group_advantages(torch.full((size,), reward), eps, scale=scale)
            assert torch.equal(found, torch.zeros(size))


@settings(deadline=None)
@given(rewards_of_a_group, st.randoms(use_true_random=False))
def test_the_order_of_the_group_does_not_matter(rewards: list[float], random: Random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    values = torch.tensor(rewards, dtype=torch.float64)
    torch.testing.assert_close(
        group_advantages(values[order]), group_advantages(values)[order], rtol=1e-9, atol=1e-9
    )


def test_each_group_is_scored_alone() -> None:
    groups = torch.tensor([[0.0, 1.0, 1.0], [5.0, 5.0, 5.0], [-1.0, 0.0, 2.0]])
    found = group_advantages(groups)
    for row, group in zip(found, groups, strict=True):
        assert torch.equal(row, group_advantages(group))


def test_advantages_carry_no_gradient() -> None:
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_advantages(rewards).requires_grad


def test_an_empty_group_stays_empty() -> None:
    assert group_advantages(torch.zeros(3, 0)).shape == (3, 0)
