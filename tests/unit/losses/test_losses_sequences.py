"""Losses of whole sequences, GSPO's two gradients and KL estimates, against loops over tokens."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.policy import (
    cispo_loss,
    gmpo_loss,
    grpo_loss,
    sapo_loss,
    token_kl,
    vespo_loss,
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


def tokens_of(mask: Tensor) -> list[tuple[int, list[int]]]:
    """Rows with a token and their tokens."""
    rows = [(b, [t for t in range(mask.shape[1]) if mask[b, t]]) for b in range(len(mask))]
    return [(b, on) for b, on in rows if on]


def same(found: Tensor, expected: Tensor, policy: Tensor) -> None:
    (wanted,) = torch.autograd.grad(expected, policy, retain_graph=True)
    (slope,) = torch.autograd.grad(found, policy)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(slope, wanted, **CLOSE)


def test_gspo_token_has_the_ratio_of_the_sequence_and_the_gradient_of_the_token() -> None:
    policy, old, _, _, mask = batch(1)
    advantages = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    value, slope = 0.0, torch.zeros_like(policy)
    for b, on in tokens_of(mask):
        ratio = math.exp(sum((policy[b, t] - old[b, t]).item() for t in on) / len(on))
        for t in on:
            a, held = advantages[b, t].item(), min(max(ratio, 0.8), 1.28)
            value -= min(ratio * a, held * a) / len(on) / 5
            if ratio * a <= held * a:
                slope[b, t] = -ratio * a / len(on) / 5
    options: dict[str, Any] = {"aggregation": "grpo", "clip_high": 0.28}
    found = grpo_loss(
        policy, old, advantages, mask, normalizer=5, ratio_level="sequence_token", **options
    ).loss
    assert found.item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(found, policy)[0], slope, **CLOSE)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_both_gradients_of_gspo_agree_where_a_sequence_has_one_advantage(kind: Any) -> None:
    policy, old, advantages, _, mask = batch(3)
    losses = [
        grpo_loss(
            policy, old, advantages, mask, normalizer=5, aggregation=kind, ratio_level=level
        ).loss
        for level in ("sequence", "sequence_token")
    ]
    slopes = [torch.autograd.grad(loss, policy)[0] for loss in losses]
    torch.testing.assert_close(*losses, **CLOSE)
    torch.testing.assert_close(*slopes, **CLOSE)


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


def test_luspo_is_gspo_with_each_sequence_weighted_by_its_length() -> None:
    policy, old, advantages, _, mask = batch(4)
    lengths = mask.sum(-1).double()
    shared: dict[str, Any] = {"normalizer": 5, "ratio_level": "sequence"}
    luspo = grpo_loss(policy, old, advantages, mask, aggregation="luspo", **shared).loss
    gspo = grpo_loss(
        policy, old, advantages, mask, aggregation="grpo", sampling_weights=lengths, **shared
    ).loss
    same(luspo, gspo, policy)


@pytest.mark.parametrize("weighted", [False, True])
def test_gmpo_agrees_with_its_definition(weighted: bool) -> None:
    policy, old, advantages, weights, mask = batch(5, 0.8)
    total = policy.sum() * 0
    for b, on in tokens_of(mask):
        a, mean, log_weight = advantages[b].item(), policy.sum() * 0, 0.0
        for t in on:
            gap = policy[b, t] - old[b, t]
            if a > 0:
                gap = gap if gap.item() < 0.4 else gap.detach() * 0 + 0.4
            if a < 0:
                gap = gap if gap.item() > -0.3 else gap.detach() * 0 - 0.3
            mean = mean + gap / len(on)
            log_weight += weights[b, t].log().item() / len(on)
        total = total - a * mean.exp() * (math.exp(log_weight) if weighted else 1)
    found = gmpo_loss(
        policy,
        old,
        advantages,
        mask,
        normalizer=5,
        log_clip_low=0.3,
        sampling_weights=weights if weighted else None,
    )
    same(found.loss, total / 5, policy)
    assert found.clipped_fraction.item() > 0


@pytest.mark.parametrize("weighted", [False, True])
def test_vespo_agrees_with_its_definition(weighted: bool) -> None:
    policy, old, advantages, weights, mask = batch(6)
    total = policy.sum() * 0
    for b, on in tokens_of(mask):
        a = advantages[b].item()
        w = math.exp(sum((policy[b, t] - old[b, t]).item() for t in on))
        w *= math.prod(weights[b, t].item() for t in on) if weighted else 1
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi = w**k * math.exp(decay * (1 - w))
        total = total - sum((phi * a * policy[b, t] for t in on), start=policy.sum() * 0)
    found = vespo_loss(
        policy, old, advantages, mask, normalizer=7, sampling_weights=weights if weighted else None
    )
    same(found.loss, total / 7, policy)


def test_on_policy_vespo_has_the_gradient_of_reinforce() -> None:
    policy, _, advantages, _, mask = batch(7)
    found = vespo_loss(policy, policy, advantages, mask, normalizer=7).loss
    (slope,) = torch.autograd.grad(found, policy)
    expected = torch.where(mask, -advantages.unsqueeze(-1) / 7, 0.0)
    torch.testing.assert_close(slope, expected, **CLOSE)


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


def test_the_expected_gradient_of_each_estimate_is_that_of_the_stated_divergence() -> None:
    rng = torch.Generator().manual_seed(12)
    logits = torch.randn(7, dtype=torch.float64, generator=rng).requires_grad_()
    reference = torch.randn(7, dtype=torch.float64, generator=rng).log_softmax(-1)
    policy = logits.log_softmax(-1)
    every, p = torch.ones(7).bool(), policy.detach().exp()
    exact = {
        "k1": policy.sum() * 0,
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }
    for estimator, divergence in exact.items():
        name: Any = estimator
        found = (p * token_kl(policy, reference, every, estimator=name)).sum()
        slopes = [
            torch.autograd.grad(value, logits, retain_graph=True)[0]
            for value in (found, divergence)
        ]
        wanted = torch.zeros_like(slopes[0]) if estimator == "k1" else slopes[1]
        torch.testing.assert_close(slopes[0], wanted, rtol=1e-9, atol=1e-11)
