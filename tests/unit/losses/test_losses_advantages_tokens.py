"""Token advantages and whitening against loops over their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.advantages import (
    masked_whiten,
    reinforce_plus_plus_baseline_advantages,
)


def batch(rows: int = 4, tokens: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Values in float64 and a mask with at least two tokens a row."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=rng) < 0.6
    mask[:, :2] = True
    return torch.randn(rows, tokens, generator=rng, dtype=torch.float64), mask


def whitened(values: list[float]) -> list[float]:
    """The definition in verl's words: 1e-8 in the count and in the root."""
    n = len(values) + 1e-8
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / n * len(values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_whitening_is_over_the_masked_values_only() -> None:
    values, mask = batch()
    found = masked_whiten(torch.where(mask, values, math.nan), mask)
    assert found[mask].tolist() == pytest.approx(whitened(values[mask].tolist()), rel=1e-9)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_have_nothing_to_whiten(count: int) -> None:
    mask = torch.arange(3) < count
    assert torch.equal(masked_whiten(torch.full((3,), 5.0), mask), torch.zeros(3))


@given(value=st.floats(-9, 9, width=32), size=st.integers(2, 50))
@settings(max_examples=25, deadline=None)
def test_equal_values_whiten_to_nothing(value: float, size: int) -> None:
    found = masked_whiten(torch.full((size,), value), torch.ones(size).bool())
    torch.testing.assert_close(found, torch.zeros(size), rtol=0, atol=1e-6)


def test_reinforce_plus_plus_baseline_centres_by_group_before_it_whitens() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 5.0]], dtype=torch.float64)
    mask = batch(6, 4, seed=2)[1].reshape(2, 3, 4)
    centred = rewards - rewards.mean(-1, keepdim=True)
    flat = centred.unsqueeze(-1).expand(2, 3, 4)[mask].tolist()
    found = reinforce_plus_plus_baseline_advantages(rewards, mask)
    assert found[mask].tolist() == pytest.approx(whitened(flat), rel=1e-9, abs=1e-11)
    assert found[~mask].abs().sum() == 0


def test_an_absent_rollout_counts_neither_in_its_group_nor_in_the_whitening() -> None:
    rewards = torch.tensor([[0.0, 1.0, math.nan], [2.0, 4.0, math.nan]], dtype=torch.float64)
    mask = torch.ones(2, 3, 4).bool()
    present = ~rewards.isnan()
    found = reinforce_plus_plus_baseline_advantages(rewards, mask, present=present)
    without = reinforce_plus_plus_baseline_advantages(rewards[:, :2], mask[:, :2])
    assert torch.equal(found[:, :2], without)
    assert found[:, 2].abs().sum() == 0


def test_a_group_of_one_keeps_its_reward_before_whitening_unless_zero_is_asked() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1, 2).bool()
    raw = reinforce_plus_plus_baseline_advantages(rewards, mask)
    assert raw.flatten().tolist() == pytest.approx(whitened([1, 1, 3, 3]), rel=1e-6)
    zero = reinforce_plus_plus_baseline_advantages(rewards, mask, singleton="zero")
    assert zero.abs().sum() == 0


def test_a_mask_that_selects_nothing_gives_zeros() -> None:
    values, mask = batch()
    nothing, nans = torch.zeros_like(mask), torch.full_like(values, math.nan)
    assert torch.equal(masked_whiten(nans, nothing), torch.zeros_like(values))


def test_token_advantages_are_detached_and_keep_their_dtype() -> None:
    values, mask = batch()
    found = masked_whiten(values.clone().requires_grad_(), mask)
    assert not found.requires_grad
    single = masked_whiten(values.float(), mask)
    torch.testing.assert_close(single.double(), found, rtol=5e-5, atol=2e-6)
    assert masked_whiten(values.bfloat16(), mask).dtype == torch.float32
