"""Advantages of turns against hand-computed cases, and where they are those of rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.advantages import (
    gigpo_advantages,
    group_advantages,
    mt_grpo_advantages,
    turn_return_advantages,
    turn_returns,
)

NONE: dict[str, Any] = {"scale": "none"}


def whole(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def test_returns_are_discounted_from_turn_to_turn_and_end_with_the_rollout() -> None:
    rewards = torch.tensor([[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert turn_returns(rewards, mask, 0.5).tolist() == [[2.0, 2.0, 4.0], [6.0, 8.0, 0.0]]


def test_returns_of_a_turn_are_compared_with_the_same_turn_of_the_others() -> None:
    # Returns with gamma 1/2: 2 2 4 | 6 8 -, so turn 3 has no other to be compared with.
    rewards = torch.tensor([[[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]]])
    mask = torch.tensor([[[True, True, True], [True, True, False]]])
    found = turn_return_advantages(rewards, mask, gamma=0.5, **NONE)
    assert found.tolist() == [[[-2.0, -3.0, 0.0], [2.0, 3.0, 0.0]]]


def test_returns_of_all_turns_are_compared_where_the_group_is_the_baseline() -> None:
    rewards = torch.tensor([[[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]]])
    mask = torch.tensor([[[True, True, True], [True, True, False]]])
    found = turn_return_advantages(rewards, mask, gamma=0.5, baseline="group", **NONE)
    mean = (2 + 2 + 4 + 6 + 8) / 5
    expected = [[2 - mean, 2 - mean, 4 - mean], [6 - mean, 8 - mean, 0.0]]
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_a_turns_own_reward_and_the_outcome_are_compared_apart() -> None:
    # Turn rewards 1 0 | 0 0, outcomes 0 and 1; the outcome counts half before the last turn.
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    found = mt_grpo_advantages(
        rewards, torch.tensor([[0.0, 1.0]]), whole(1, 2, 2), outcome_weight=0.5, **NONE
    )
    assert found.tolist() == [[[0.5 - 0.25, -0.5], [-0.5 + 0.25, 0.5]]]


def test_a_state_that_several_turns_have_seen_compares_what_came_of_it() -> None:
    # State 7 is seen by turn 1 of both and turn 2 of the first; returns there 2, 1 and 0.
    rewards, totals = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]]), torch.tensor([[2.0, 1.0]])
    states = torch.tensor([[[7, 7], [7, 9]]])
    found = gigpo_advantages(rewards, totals, whole(1, 2, 2), states, gamma=1.0, **NONE)
    mean = (2 + 2 + 1) / 3
    expected = [[0.5 + 2 - mean, 0.5 + 2 - mean], [-0.5 + 1 - mean, -0.5]]
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_equal_numbers_of_other_prompts_are_other_states() -> None:
    rewards, states = torch.tensor([[[5.0], [5.0]], [[1.0], [1.0]]]), torch.zeros(2, 2, 1).long()
    found = gigpo_advantages(rewards, rewards[..., 0], whole(2, 2, 1), states)
    assert found.tolist() == [[[0.0], [0.0]], [[0.0], [0.0]]]


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turn_returns": lambda at_end, mask: turn_return_advantages(at_end, mask),
    "mt_grpo": lambda at_end, mask: mt_grpo_advantages(
        torch.zeros_like(at_end), at_end[..., -1], mask
    ),
    "gigpo": lambda at_end, mask: gigpo_advantages(
        at_end, at_end[..., -1], mask, torch.zeros(mask.shape).long(), step_weight=0.0
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 2**16), turns=st.integers(1, 4))
@settings(max_examples=20)
def test_without_rewards_of_turns_each_turn_has_the_advantage_of_its_rollout(
    name: str, seed: int, turns: int
) -> None:
    outcomes = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    at_end = torch.zeros(3, 5, turns)
    at_end[..., -1] = outcomes
    found = ESTIMATORS[name](at_end, whole(3, 5, turns))
    assert torch.equal(found, group_advantages(outcomes).unsqueeze(-1).expand_as(found))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_rollouts_have_no_advantages(name: str) -> None:
    assert ESTIMATORS[name](torch.zeros(2, 0, 1), whole(2, 0, 1)).shape == (2, 0, 1)


def test_a_discount_outside_of_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        turn_returns(torch.zeros(1, 2), whole(1, 2), 1.5)
