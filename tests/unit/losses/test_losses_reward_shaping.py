"""What is done to rewards before advantages, against the definitions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.advantages import (
    gpg_advantages,
    group_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    opo_advantages,
    overlong_penalty,
    relative_length_penalty,
)

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_opo_weights_the_baseline_by_length() -> None:
    rewards, lengths = normal(3, 5), torch.randint(1, 9, (3, 5))
    for row, reward, length in zip(
        opo_advantages(rewards, lengths).tolist(), rewards.tolist(), lengths.tolist(), strict=True
    ):
        mean = sum(r * n for r, n in zip(reward, length, strict=True)) / sum(length)
        assert row == pytest.approx([r - mean for r in reward], rel=1e-9)


def test_opo_of_equal_lengths_or_of_none_only_takes_the_mean_off() -> None:
    rewards = normal(3, 5)
    expected = group_advantages(rewards, scale="none")
    for lengths in (torch.full((3, 5), 4), torch.zeros(3, 5)):
        torch.testing.assert_close(opo_advantages(rewards, lengths), expected, **TIGHT)


def test_gpg_makes_up_for_rollouts_without_a_reward() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert gpg_advantages(rewards).tolist() == [[6.0, -2.0, -2.0, -2.0], [0.0] * 4]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (500, -0.5)]
)
def test_the_overlong_penalty_grows_over_the_buffer_before_the_limit(
    length: int, penalty: float
) -> None:
    options: dict[str, Any] = {"max_length": 100, "buffer": 20, "factor": 0.5}
    assert overlong_penalty(torch.tensor([length]), **options).item() == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer is {buffer} but has to be above 0 and at most"):
        overlong_penalty(torch.ones(2), max_length=100, buffer=buffer)


def test_kimis_length_reward_never_rewards_a_wrong_answer_for_being_short() -> None:
    lengths = torch.tensor([[10, 20, 30], [10, 20, 30], [7, 7, 7]])
    correct = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    found = kimi_length_reward(lengths, correct)
    assert found.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]]


def test_kimis_length_reward_compares_with_the_rollouts_that_exist() -> None:
    lengths, present = torch.tensor([[10, 20, 900]]), torch.tensor([[True, True, False]])
    found = kimi_length_reward(lengths, torch.tensor([[True, True, True]]), present=present)
    assert found.tolist() == [[0.5, -0.5, 0.0]]


def test_grpo_leads_length_reward_is_the_papers_over_the_correct_rollouts_of_a_group() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    lengths, correct = torch.tensor([[100, 200, 300, 900]]), rewards > 0
    terms = grpo_lead_length_reward(rewards, lengths, correct, alpha=0.5)
    # The mean of the correct is 200, and their unbiased standard deviation 100.
    expected = [math.exp(0.5), 1.0, math.exp(-0.5), -1.0]
    assert (rewards + terms)[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_grpo_leads_length_reward_changes_nothing_where_nothing_is_compared(count: int) -> None:
    lengths = torch.tensor([[10, 20, 900]])
    correct = torch.arange(3).expand(1, 3) < count
    assert not grpo_lead_length_reward(torch.ones(1, 3), lengths, correct).any()


def test_grpo_leads_length_reward_compares_with_the_rollouts_that_exist() -> None:
    lengths, present = torch.tensor([[10, 20, 900]]), torch.tensor([[True, True, False]])
    correct = torch.ones(1, 3, dtype=torch.bool)
    found = grpo_lead_length_reward(torch.ones(1, 3), lengths, correct, present=present)
    alone = grpo_lead_length_reward(torch.ones(1, 2), lengths[:, :2], correct[:, :2])
    assert found[0].tolist() == [*alone[0].tolist(), 0.0]


def test_the_relative_length_penalty_is_a_share_of_the_groups_mean_reward() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    lengths = torch.tensor([[10, 40, 20, 30], [1, 2, 3, 4]])
    found = relative_length_penalty(rewards, lengths, weight=0.2)
    assert found[0].tolist() == pytest.approx([-0.025, -0.1, -0.05, -0.075])
    assert not found[1].any()
