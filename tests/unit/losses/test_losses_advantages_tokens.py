"""Token advantages and normalizations against loops over their definitions."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.advantages import (
    group_advantages,
    grouped_normalization,
    masked_normalization,
    masked_whiten,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_token_advantages,
)

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


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


def optimizer_state(values: list[float], unbiased: bool) -> tuple[float, float]:
    mean = sum(values) / len(values)
    squares = sum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(squares / (len(values) - unbiased))


def test_whitening_is_over_the_masked_values_only() -> None:
    values, mask = batch()
    found = masked_whiten(torch.where(mask, values, math.nan), mask)
    assert found[mask].tolist() == pytest.approx(whitened(values[mask].tolist()), rel=1e-9)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))
    mean = values[mask].mean()
    kept = masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(kept[mask], found[mask] + mean, rtol=0, atol=1e-8)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_have_nothing_to_whiten(count: int) -> None:
    mask = torch.arange(3) < count
    assert torch.equal(masked_whiten(torch.full((3,), 5.0), mask), torch.zeros(3))


@given(value=st.floats(-9, 9, width=32), size=st.integers(2, 50))
@settings(max_examples=25, deadline=None)
def test_equal_values_whiten_to_nothing(value: float, size: int) -> None:
    found = masked_whiten(torch.full((size,), value), torch.ones(size).bool())
    torch.testing.assert_close(found, torch.zeros(size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gaps", ["carry", "reset"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus_whitens_the_discounted_returns(gamma: float, gaps: str) -> None:
    rewards, mask = batch(seed=1)
    returns = []
    for row, on in zip(rewards.tolist(), mask.tolist(), strict=True):
        running, backwards = 0.0, []
        for t in reversed(range(len(row))):
            if on[t]:
                running = row[t] + gamma * running
                backwards.append(running)
            elif gaps == "reset":
                running = 0.0
        returns += reversed(backwards)
    dirty = torch.where(mask, rewards, math.nan)
    found = reinforce_plus_plus_advantages(dirty, mask, gamma, gaps=gaps)
    assert found[mask].tolist() == pytest.approx(whitened(returns), rel=1e-9, abs=1e-11)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))


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


def test_remax_counts_the_reward_to_come_less_the_greedy_one() -> None:
    rewards, mask = batch(seed=3)
    greedy = torch.arange(4.0, dtype=torch.float64)
    found = remax_token_advantages(torch.where(mask, rewards, math.nan), greedy, mask)
    for b, t in itertools.product(range(4), range(6)):
        to_come = sum(rewards[b, i].item() for i in range(t, 6) if mask[b, i])
        expected = to_come - b if mask[b, t] else 0.0
        assert found[b, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_masked_normalization_leaves_minus_the_mean_under_no_mask(unbiased: bool) -> None:
    values, mask = batch(seed=4)
    found = masked_normalization(torch.where(mask, values, math.inf), mask, unbiased=unbiased)
    mean, std = optimizer_state(values[mask].tolist(), unbiased)
    expected = (torch.where(mask, values, 0.0) - mean) / (std + 1e-5)
    torch.testing.assert_close(found, expected, **TIGHT)


def test_masked_normalization_takes_its_statistics_over_the_axes_asked_for() -> None:
    values, mask = batch(seed=5)
    rows = [masked_normalization(v, m) for v, m in zip(values, mask, strict=True)]
    torch.testing.assert_close(masked_normalization(values, mask, -1), torch.stack(rows), **TIGHT)
    assert torch.equal(masked_normalization(values), masked_normalization(values, dim=(0, 1)))
    assert masked_normalization(values, torch.zeros_like(mask)).abs().sum() == 0


LEVELS = ["batch", "group", None]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("levels", list(itertools.product(LEVELS, LEVELS)), ids=str)
def test_grouped_normalization_agrees_with_a_loop_over_its_values(
    levels: tuple[str | None, str | None], unbiased: bool, leave_one_out: bool
) -> None:
    values, mask = batch(rows=6, tokens=3, seed=6)
    flat = [(b, t) for b, t in itertools.product(range(6), range(3)) if mask[b, t]]

    def peers(level: str | None, b: int) -> list[tuple[int, int]]:
        return [p for p in flat if level == "batch" or p[0] // 2 == b // 2]

    def centred(b: int, t: int) -> float:
        if levels[0] is None:
            return values[b, t].item()
        others = [p for p in peers(levels[0], b) if not (leave_one_out and p == (b, t))]
        return values[b, t].item() - sum(values[p].item() for p in others) / len(others)

    found = grouped_normalization(
        torch.where(mask, values, math.nan),
        mask,
        group_size=2,
        mean_level=levels[0],
        std_level=levels[1],
        mean_leave1out=leave_one_out,
        std_unbiased=unbiased,
    )
    assert found[~mask].abs().sum() == 0
    for b, t in flat:
        expected = centred(b, t)
        if levels[1] is not None:
            squares = [centred(*p) ** 2 for p in peers(levels[1], b)]
            expected /= math.sqrt(sum(squares) / (len(squares) - unbiased)) + 1e-5
        assert found[b, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_grouped_normalization_of_rewards_is_the_group_advantage() -> None:
    rewards = batch(3, 4, seed=7)[0]
    found = grouped_normalization(
        rewards.flatten(), group_size=4, mean_level="group", std_level="group", eps=1e-4
    )
    torch.testing.assert_close(found.reshape(3, 4), group_advantages(rewards), **TIGHT)


def test_groups_of_one_have_no_mean_left_out_and_a_std_of_one() -> None:
    rewards = torch.tensor([2.0, 7.0])
    levels = {"mean_level": "group", "std_level": "group", "eps": 0.0}
    found = grouped_normalization(rewards, mean_leave1out=True, **levels)
    assert torch.equal(found, rewards)
    assert torch.equal(grouped_normalization(rewards, **levels), torch.zeros(2))


def test_a_mask_that_selects_nothing_gives_zeros() -> None:
    values, mask = batch()
    nothing, nans = torch.zeros_like(mask), torch.full_like(values, math.nan)
    for found in (
        masked_whiten(nans, nothing),
        grouped_normalization(nans, nothing),
        reinforce_plus_plus_advantages(nans, nothing),
        remax_token_advantages(nans, values[:, 0], nothing),
    ):
        assert torch.equal(found, torch.zeros_like(values))


def test_groups_that_do_not_divide_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="group_size is 3 but has to be >= 1 and divide the 4"):
        grouped_normalization(torch.zeros(4), group_size=3, mean_level="group")
    with pytest.raises(ValueError, match=r"gamma is 1.5 but has to be in \[0, 1\]"):
        reinforce_plus_plus_advantages(*batch(), 1.5)


def test_token_advantages_are_detached_and_keep_their_dtype() -> None:
    values, mask = batch()
    for function in (masked_whiten, masked_normalization, grouped_normalization):
        found = function(values.clone().requires_grad_(), mask)
        assert not found.requires_grad
        single = function(values.float(), mask)
        torch.testing.assert_close(single.double(), found, rtol=5e-5, atol=2e-6)
        assert function(values.bfloat16(), mask).dtype == torch.float32
