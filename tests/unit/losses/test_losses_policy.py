"""Policy losses against independent loops, closed-form gradients and their invariants.

Policy losses against values and gradients that the published code gave for the same inputs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from upstream_cases import POLICY, TOLERANCES, check_kl, check_policy, check_weights

from composer_mesh.losses.policy import grpo_loss, token_logprobs

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


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
