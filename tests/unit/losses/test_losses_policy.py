"""Policy losses against independent loops, closed-form gradients and their invariants.

Policy losses against values and gradients that the published code gave for the same inputs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor
from upstream_cases import POLICY, TOLERANCES, check_kl, check_policy, check_weights

from composer_mesh.losses.policy import PolicyLoss, grpo_loss, token_logprobs

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


FIGURES = ("loss", "clipped_fraction", "ratio_mean", "kl_k3")


def batch(
    rows: int = 3, tokens: int = 5, seed: int = 0, scale: float = 0.5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, behaviour log-probs, per-sequence advantages and a mask, in float64."""
    rng = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, tokens, generator=rng, dtype=torch.float64) * 3
    behaviour = policy + scale * torch.randn(rows, tokens, generator=rng, dtype=torch.float64)
    advantages = torch.randn(rows, generator=rng, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=rng) < 0.7
    return policy.requires_grad_(), behaviour, advantages, mask


def grpo_by_hand(
    policy: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    cap: float = math.inf,
) -> tuple[float, list[list[float]]]:
    """The surrogate and its derivative in each log-prob, one token at a time, undivided."""
    total, gradient = 0.0, []
    for lp_row, old_row, a, mask_row in zip(
        policy.tolist(), behaviour.tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        gradient.append([0.0] * len(lp_row))
        for t, (lp, old, on) in enumerate(zip(lp_row, old_row, mask_row, strict=True)):
            if not on:
                continue
            r = math.exp(lp - old)
            free, held = min(r, cap) * a, min(max(r, 1 - low), 1 + high) * a
            total -= min(free, held)
            moves = r < cap if free < held else (r < cap and 1 - low <= r <= 1 + high)
            gradient[-1][t] = -a * r if moves else 0.0
    return total, gradient


def test_token_logprobs_are_the_log_of_the_tempered_softmax() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 6, 3], [2, 2, 5]])
    found = token_logprobs(logits, targets, temperature=0.7)
    for b in range(2):
        for t in range(3):
            weights = [math.exp(x / 0.7) for x in logits[b, t].tolist()]
            expected = math.log(weights[int(targets[b, t])] / sum(weights))
            assert found[b, t].item() == pytest.approx(expected, rel=1e-12)


def test_token_logprobs_do_not_shift() -> None:
    logits = torch.full((1, 2, 3), -50.0)
    logits[0, 0, 1] = logits[0, 1, 2] = 50.0
    assert torch.equal(token_logprobs(logits, torch.tensor([[1, 2]])), torch.zeros(1, 2))


def test_token_logprobs_of_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2)).bfloat16()
    targets = torch.tensor([0, 1, 2, 3])
    found = token_logprobs(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, token_logprobs(logits.float(), targets))


def test_token_logprobs_pass_gradcheck_under_extreme_logits() -> None:
    logits = torch.tensor([[50.0, -50.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([2, 0])
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, targets, 1.3), logits.requires_grad_()
    )


@pytest.mark.parametrize("cap", [None, 1.4])
@pytest.mark.parametrize("seed", range(4))
def test_grpo_value_and_gradient_agree_with_a_loop_over_tokens(
    seed: int, cap: float | None
) -> None:
    policy, behaviour, advantages, mask = batch(rows=6, tokens=9, seed=seed)
    found = grpo_loss(
        policy, behaviour, advantages, mask, normalizer=11, ratio_cap=cap, **CLIP
    ).loss
    found.backward()
    value, gradient = grpo_by_hand(
        policy.detach(), behaviour, advantages, mask, 0.2, 0.28, cap or math.inf
    )
    assert found.item() == pytest.approx(value / 11, rel=1e-12)
    expected = torch.tensor(gradient, dtype=torch.float64) / 11
    torch.testing.assert_close(policy.grad, expected, rtol=1e-12, atol=1e-14)


def test_on_policy_the_gradient_is_the_advantage() -> None:
    policy, _, advantages, mask = batch()
    n = int(mask.sum())
    found = grpo_loss(policy, policy, advantages, mask, normalizer=n, **CLIP)
    found.loss.backward()
    expected = -advantages.unsqueeze(-1) * mask / n
    torch.testing.assert_close(policy.grad, expected)
    assert found.ratio_mean.item() == pytest.approx(1.0)
    assert found.kl_k3.item() == 0
    assert found.clipped_fraction.item() == 0


def test_figures_are_means_over_the_masked_tokens() -> None:
    policy, behaviour, advantages, mask = batch(rows=4, tokens=6, seed=7)
    n = int(mask.sum())
    found = grpo_loss(policy, behaviour, advantages, mask, normalizer=n, **CLIP)
    ratios = [
        (math.exp(lp - old), float(a))
        for row in range(4)
        for lp, old, on, a in zip(
            policy[row].tolist(),
            behaviour[row].tolist(),
            mask[row].tolist(),
            [advantages[row].item()] * 6,
            strict=True,
        )
        if on
    ]
    clipped = sum((r > 1.28 and a > 0) or (r < 0.8 and a < 0) for r, a in ratios)
    assert 0 < clipped < n
    assert found.clipped_fraction.item() == pytest.approx(clipped / n)
    assert found.ratio_mean.item() == pytest.approx(sum(r for r, _ in ratios) / n)
    assert found.kl_k3.item() == pytest.approx(sum(r - 1 - math.log(r) for r, _ in ratios) / n)


@given(split=st.integers(0, 6), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_microbatch_losses_add_up_to_the_batch_loss(split: int, seed: int) -> None:
    policy, behaviour, advantages, mask = batch(rows=6, seed=seed)
    n = int(mask.sum())

    def part(rows: slice) -> PolicyLoss:
        return grpo_loss(
            policy[rows], behaviour[rows], advantages[rows], mask[rows], normalizer=n, **CLIP
        )

    whole, first, second = part(slice(None)), part(slice(split)), part(slice(split, None))
    for name in FIGURES:
        total = getattr(first, name) + getattr(second, name)
        torch.testing.assert_close(total, getattr(whole, name), rtol=1e-12, atol=1e-14)


def test_one_advantage_per_sequence_equals_the_same_one_on_each_token() -> None:
    policy, behaviour, advantages, mask = batch()
    spread = advantages.unsqueeze(-1).expand_as(policy)
    per_sequence = grpo_loss(policy, behaviour, advantages, mask, normalizer=5, **CLIP)
    per_token = grpo_loss(policy, behaviour, spread, mask, normalizer=5, **CLIP)
    assert torch.equal(per_sequence.loss, per_token.loss)


def test_a_flat_packed_row_gives_the_loss_of_its_sequences() -> None:
    policy, behaviour, advantages, mask = batch()
    spread = advantages.unsqueeze(-1).expand_as(policy)
    whole = grpo_loss(policy, behaviour, advantages, mask, normalizer=5, **CLIP)
    flat = [x.flatten() for x in (policy, behaviour, spread, mask)]
    torch.testing.assert_close(grpo_loss(*flat, normalizer=5, **CLIP).loss, whole.loss)


def test_no_gradient_reaches_the_behaviour_policy_or_the_advantages() -> None:
    policy, behaviour, advantages, mask = batch()
    behaviour.requires_grad_()
    advantages.requires_grad_()
    grpo_loss(policy, behaviour, advantages, mask, normalizer=5, **CLIP).loss.backward()
    assert behaviour.grad is None
    assert advantages.grad is None
    assert policy.grad is not None


def test_what_stands_under_no_mask_changes_nothing_even_when_nan() -> None:
    policy, behaviour, advantages, mask = batch()
    clean = grpo_loss(policy, behaviour, advantages, mask, normalizer=5, **CLIP)
    (clean_gradient,) = torch.autograd.grad(clean.loss, policy)
    dirty_policy = torch.where(mask, policy.detach(), math.nan).requires_grad_()
    dirty = grpo_loss(
        dirty_policy, torch.where(mask, behaviour, math.inf), advantages, mask, normalizer=5, **CLIP
    )
    dirty.loss.backward()
    for name in FIGURES:
        assert torch.equal(getattr(clean, name), getattr(dirty, name))
    assert torch.equal(dirty_policy.grad, clean_gradient)


@pytest.mark.parametrize("normalizer", [0, 7])
def test_an_empty_mask_gives_zero_and_a_zero_gradient(normalizer: int) -> None:
    policy, behaviour, advantages, mask = batch()
    found = grpo_loss(
        policy, behaviour, advantages, torch.zeros_like(mask), normalizer=normalizer, **CLIP
    )
    found.loss.backward()
    assert [getattr(found, name).item() for name in FIGURES] == [0, 0, 0, 0]
    assert torch.equal(policy.grad, torch.zeros_like(policy))


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_extreme_log_ratio_keeps_loss_and_gradient_finite(advantage: float) -> None:
    policy = torch.tensor([[0.0, -500.0]], requires_grad=True)
    behaviour = torch.tensor([[-500.0, 0.0]])
    mask = torch.tensor([[True, True]])
    found = grpo_loss(policy, behaviour, torch.tensor([advantage]), mask, normalizer=2, **CLIP)
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert torch.isfinite(policy.grad).all()


def test_the_ratio_cap_bounds_the_loss_of_a_bad_sample() -> None:
    policy, behaviour = torch.tensor([[0.0]]), torch.tensor([[-5.0]])
    bad, mask = torch.tensor([-1.0]), torch.tensor([[True]])
    free = grpo_loss(policy, behaviour, bad, mask, normalizer=1, **CLIP)
    capped = grpo_loss(policy, behaviour, bad, mask, normalizer=1, ratio_cap=3.0, **CLIP)
    assert free.loss.item() == pytest.approx(math.exp(5), rel=1e-5)
    assert capped.loss.item() == 3.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"normalizer": -1}, "normalizer is -1 but has to be a finite count"),
        ({"normalizer": math.nan}, "normalizer is nan"),
        ({"clip_low": 1.5}, r"clip_low is 1.5 but has to be in \[0, 1\]: use 0.2"),
        ({"clip_high": -0.1}, "clip_high is -0.1 but has to be >= 0"),
        ({"ratio_cap": 0.0}, "ratio_cap is 0.0 but has to be > 0"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    changed: dict[str, float], message: str
) -> None:
    settings_ = {"normalizer": 5, **CLIP, **changed}
    with pytest.raises(ValueError, match=message):
        grpo_loss(*batch(), **settings_)


def test_advantages_of_another_shape_are_an_error_that_names_both_shapes() -> None:
    policy, behaviour, _, mask = batch()
    with pytest.raises(ValueError, match=r"shape \(1,\) but log-probs \(3, 5\)"):
        grpo_loss(policy, behaviour, torch.zeros(1), mask, normalizer=5, **CLIP)


def test_the_shapes_in_the_signatures_are_checked_in_these_tests() -> None:
    with pytest.raises(TypeCheckError):
        token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    policy, behaviour, advantages, mask = batch()
    with pytest.raises(TypeCheckError):
        grpo_loss(policy, behaviour, advantages, mask.long(), normalizer=5, **CLIP)


every_type = pytest.mark.parametrize("dtype", TOLERANCES)


def named(case: dict[str, Any]) -> str:
    return f"{case['source'].split()[0]} {case.get('function', 'weights')} {case['batch']}"


@every_type
@pytest.mark.parametrize("case", POLICY["cases"], ids=named)
def test_loss_and_gradient_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_policy(case, dtype)


@every_type
@pytest.mark.parametrize("case", POLICY["weights"], ids=named)
def test_sampling_weights_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_weights(case, dtype)


@every_type
@pytest.mark.parametrize("case", POLICY["kl"], ids=lambda case: case["source"].split()[-1])
def test_kl_estimates_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_kl(case, dtype)
