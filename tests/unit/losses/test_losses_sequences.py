"""Losses of whole sequences, GSPO's two gradients and KL estimates, against loops over tokens.

The sampler correction's weights against loops, and REINFORCE with and without them.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.policy import (
    cispo_loss,
    gmpo_loss,
    grpo_loss,
    off_policy_weights,
    reinforce_loss,
    sampling_weights,
    sapo_loss,
    token_kl,
)

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def batch(seed: int = 0, scale: float = 0.4) -> list[Tensor]:
    """Log-probs of policy and old policy, advantages, weights and a mask with an empty row."""
    rng = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 6, generator=rng, dtype=torch.float64)
    policy = old + scale * torch.randn(5, 6, generator=rng, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.5, 0.7, 0.0, -0.3], dtype=torch.float64)
    weights = 0.5 + torch.rand(5, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=rng) < 0.7
    mask[2] = False
    return [policy.requires_grad_(), old, advantages, weights, mask]


def same(found: Tensor, expected: Tensor, policy: Tensor) -> None:
    (wanted,) = torch.autograd.grad(expected, policy, retain_graph=True)
    (slope,) = torch.autograd.grad(found, policy)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(slope, wanted, **CLOSE)


def test_both_gradients_of_gspo_differ_where_the_weights_of_tokens_do() -> None:
    policy, old, advantages, weights, mask = batch(3)
    slopes = [
        torch.autograd.grad(
            grpo_loss(
                policy,
                old,
                advantages,
                mask,
                normalizer=5,
                aggregation="grpo",
                ratio_level=level,
                sampling_weights=weights,
            ).loss,
            policy,
        )[0]
        for level in ("sequence", "sequence_token")
    ]
    assert not torch.allclose(*slopes, rtol=1e-3)


def test_sapo_of_a_sequence_takes_the_mean_of_its_tokens_advantages() -> None:
    policy, old, _, _, mask = batch(8)
    advantages = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    mean = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    shared: dict[str, Any] = {"normalizer": 5, "ratio_level": "sequence"}
    same(
        sapo_loss(policy, old, advantages, mask, **shared).loss,
        sapo_loss(policy, old, mean, mask, **shared).loss,
        policy,
    )


def test_a_clip_low_of_one_never_raises_a_ratio() -> None:
    policy, old = torch.tensor([[-9.0]], requires_grad=True), torch.tensor([[0.0]])
    mask = torch.ones(1, 1).bool()
    found = cispo_loss(policy, old, torch.ones(1), mask, normalizer=1)
    found.loss.backward()
    assert found.clipped_fraction.item() == 0
    assert policy.grad.item() == pytest.approx(-math.exp(-9))


ESTIMATORS: dict[str, Any] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
    "low_var_kl": lambda d: min(math.exp(min(-d, 20)) - 1 + max(d, -20), 10),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scale", [0.4, 5.0])
def test_a_kl_estimate_agrees_with_its_definition(estimator: Any, scale: float) -> None:
    policy, reference, _, _, mask = batch(10, scale)
    found = token_kl(policy, reference, mask, estimator=estimator)
    for b, t in torch.ones_like(mask).nonzero().tolist():
        gap = (policy[b, t] - reference[b, t]).item()
        expected = ESTIMATORS[estimator](gap) if mask[b, t] else 0.0
        assert found[b, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_kl_estimate_with_the_gradient_of_k2_keeps_its_own_value(estimator: Any) -> None:
    policy, reference, _, _, mask = batch(11)
    found = token_kl(policy, reference, mask, estimator=estimator, k2_gradient=True)
    torch.testing.assert_close(found, token_kl(policy, reference, mask, estimator=estimator))
    (slope,) = torch.autograd.grad(found.sum(), policy)
    torch.testing.assert_close(slope, torch.where(mask, policy - reference, 0.0).detach(), **CLOSE)


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


BOUNDS = [(3.0, None), (1.5, 0.5), (None, 0.8), (None, None)]


def policies(
    rows: int = 5, tokens: int = 4, seed: int = 0, scale: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of two policies and a mask with an empty row, in float64."""
    rng = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64)
    sampling = old + scale * torch.randn(rows, tokens, generator=rng, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=rng) < 0.7
    mask[:1] = False
    return old, sampling, mask


def weights_by_hand(
    old: Tensor, sampling: Tensor, mask: Tensor, mode: str, top: float, bottom: float
) -> list[list[float]]:
    found = []
    for o, s, on in zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True):
        gaps = [x - y if m else 0.0 for x, y, m in zip(o, s, on, strict=True)]
        if mode.startswith("sequence"):
            gaps = [math.fsum(gaps)] * len(gaps)
        row = [math.exp(g) for g in gaps]
        if mode.endswith("truncate"):
            found.append([min(max(w, bottom), top) for w in row])
        else:
            found.append([w if bottom <= w <= top else 0.0 for w in row])
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("maximum", "minimum"), BOUNDS)
def test_each_mode_agrees_with_its_definition(
    mode: Any, maximum: float | None, minimum: float | None
) -> None:
    values = policies(seed=3)
    found = sampling_weights(*values, mode=mode, maximum=maximum, minimum=minimum)
    top, bottom = math.inf if maximum is None else maximum, minimum or 0.0
    expected = torch.tensor(weights_by_hand(*values, mode, top, bottom), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_under_no_mask_does_not_count(mode: Any) -> None:
    old, sampling, mask = policies()
    dirty = torch.where(mask, sampling, math.nan)
    assert torch.equal(
        sampling_weights(old, dirty, mask, mode=mode),
        sampling_weights(old, torch.where(mask, sampling, 0.0), mask, mode=mode),
    )


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("mode", MODES)
def test_an_absurd_mismatch_keeps_the_weights_finite(mode: Any, gap: float) -> None:
    old, mask = torch.zeros(1, 3), torch.ones(1, 3).bool()
    for maximum in (3.0, None):
        found = sampling_weights(old, torch.full((1, 3), gap), mask, mode=mode, maximum=maximum)
        assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"maximum": 0.0}, "maximum is 0.0 but must be > 0: use 3.0"),
        ({"minimum": -1.0}, "minimum is -1.0 but must be >= 0"),
        ({"minimum": 4.0}, "minimum is 4.0 but must be <= maximum, 3.0: raise maximum"),
    ],
)
def test_impossible_bounds_are_named(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_weights(*policies(), **changed)


def test_only_bad_sequences_far_from_their_sampler_are_dropped() -> None:
    policy = torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.0, -1.0], [-9.0, -1.0]])
    sampling = torch.full((4, 2), -1.0)
    mask = torch.tensor([[True, True], [True, True], [True, True], [False, True]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    found = off_policy_weights(policy, sampling, advantages, mask, threshold=0.5)
    assert found.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert off_policy_weights(policy, sampling, advantages, mask, threshold=1.0).min() == 1
    with pytest.raises(ValueError, match=r"threshold is -1 but must be >= 0"):
        off_policy_weights(policy, sampling, advantages, mask, threshold=-1)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_reinforce_agrees_with_its_definition(kind: Any) -> None:
    logprobs, advantages, mask = policies(seed=8)
    logprobs.requires_grad_()
    found = reinforce_loss(logprobs, advantages, mask, normalizer=7, aggregation=kind)
    found.loss.backward()
    value, slope = 0.0, torch.zeros_like(logprobs)
    for b, t in mask.nonzero().tolist():
        share = 7 * (int(mask[b].sum()) if kind == "grpo" else 1)
        slope[b, t] = -advantages[b, t] / share
        value += slope[b, t].item() * logprobs[b, t].item()
    assert found.loss.item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(logprobs.grad, slope, rtol=1e-9, atol=1e-11)


def test_gmpo_counts_the_tokens_on_which_its_clip_binds() -> None:
    mask = torch.ones(1, 2).bool()
    found = gmpo_loss(
        torch.tensor([[1.0, 0.1]]), torch.zeros(1, 2), torch.ones(1), mask, normalizer=1
    )
    assert found.clipped_fraction.item() == 0.5
