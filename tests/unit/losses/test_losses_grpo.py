"""The GRPO family against definitions written token by token, and its aggregations.

Policy losses against independent loops, closed-form gradients and their invariants.

Policy losses against values and gradients that the published code gave for the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from upstream_cases import POLICY, TOLERANCES, check_kl, check_policy, check_weights

from composer_mesh.configs.losses import GrpoLoss
from composer_mesh.losses.policy import (
    PolicyLoss,
    aggregate,
    aggregation_normalizer,
    cispo_loss,
    grpo_loss,
    sapo_loss,
    token_logprobs,
)
from composer_mesh.losses.reductions import check_choice

KINDS = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


Term = Callable[[Tensor, float, Tensor], Tensor]


def batch(
    rows: int = 4, tokens: int = 6, seed: int = 0, scale: float = 0.6
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of policy, old and reference, advantages, weights and a mask with an empty row."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    policy = -3 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64)
    old, reference = policy + scale * normal(rows, tokens), policy + scale * normal(rows, tokens)
    mask = torch.rand(rows, tokens, generator=rng) < 0.7
    mask[:1] = False
    weights = normal(rows, tokens).abs()
    return policy.requires_grad_(), old, reference, normal(rows), weights, mask


def clipped(low: float, high: float, cap: float = math.inf) -> Term:
    def term(r: Tensor, a: float, _: Tensor) -> Tensor:
        held = min(max(r.item(), 1 - low), 1 + high)
        free = r if r.item() < cap else torch.tensor(cap, dtype=r.dtype)
        bound = r if held == r.item() else torch.tensor(held, dtype=r.dtype)
        return -(free * a if free.item() * a < bound.item() * a else bound * a)

    return term


def truncated(cap: float, floor: float = 0.0) -> Term:
    return lambda r, a, lp: -min(max(r.item(), floor), cap) * a * lp


def gated(positive: float, negative: float) -> Term:
    def term(r: Tensor, a: float, _: Tensor) -> Tensor:
        tau = positive if a > 0 else negative
        return -4 / tau * a / (1 + (-tau * (r - 1)).exp())

    return term


def by_hand(
    term: Term,
    values: tuple[Tensor, ...],
    kind: str,
    normalizer: float,
    level: str = "token",
    beta: float = 0.0,
    importance: bool = False,
) -> Tensor:
    """The loss of a whole batch, one token at a time."""
    policy, old, reference, advantages, weights, mask = values
    total = policy.sum() * 0
    for b in range(len(policy)):
        on = [t for t in range(policy.shape[1]) if mask[b, t]]
        row = policy.sum() * 0
        mean = sum((policy[b, t] - old[b, t] for t in on), start=row) / max(1, len(on))
        for t in on:
            lp = policy[b, t]
            r = (mean if level == "sequence" else lp - old[b, t]).exp()
            k = (reference[b, t] - lp).exp()
            kl = (k - 1 - k.log()) * (r if importance else 1)
            row = row + term(r, advantages[b].item(), lp) * weights[b, t] + beta * kl
        total = total + (row / max(1, len(on)) if kind == "grpo" else row)
    return total / normalizer


def agrees(
    loss: Callable[..., PolicyLoss],
    term: Term,
    dtype: torch.dtype = torch.float64,
    kind: str = "dapo",
    seed: int = 0,
    beta: float = 0.0,
    **options: Any,
) -> None:
    values = batch(seed=seed)
    level, importance = options.get("ratio_level", "token"), options.get("kl_importance", False)
    expected = by_hand(term, values, kind, 7, level, beta, importance)
    (slope,) = torch.autograd.grad(expected, values[0])
    cast = [v.detach().to(dtype) if v.is_floating_point() else v for v in values]
    policy, old, reference, advantages, weights, mask = cast
    found = loss(
        policy.requires_grad_(),
        old,
        advantages,
        mask,
        normalizer=7,
        aggregation=kind,
        kl_beta=beta,
        reference_logprobs=reference,
        sampling_weights=weights,
        **options,
    ).loss
    found.backward()
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected.to(dtype), rtol=rtol, atol=atol)
    torch.testing.assert_close(policy.grad, slope.to(dtype), rtol=rtol, atol=atol)


every_type = pytest.mark.parametrize("dtype", TOLERANCES)


every_level = pytest.mark.parametrize("level", ["token", "sequence"])


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_type
@every_kind
@every_level
@pytest.mark.parametrize(("beta", "importance"), [(0.0, False), (0.3, False), (0.3, True)])
def test_grpo_agrees_with_its_definition(
    dtype: torch.dtype, kind: str, level: str, beta: float, importance: bool
) -> None:
    options = {"ratio_level": level, "kl_importance": importance, "clip_high": 0.28}
    agrees(grpo_loss, clipped(0.2, 0.28), dtype, kind, 1, beta, **options)
    agrees(grpo_loss, clipped(0.2, 0.28, 1.5), dtype, kind, 2, beta, ratio_cap=1.5, **options)


@every_type
@every_level
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_cispo_agrees_with_its_definition(dtype: torch.dtype, level: str, beta: float) -> None:
    agrees(cispo_loss, truncated(1.3), dtype, "dapo", 3, beta, clip_high=0.3, ratio_level=level)
    options = {"clip_low": 0.2, "clip_high": 0.2, "ratio_level": level}
    agrees(cispo_loss, truncated(1.2, 0.8), dtype, "grpo", 4, beta, **options)


@every_type
@every_level
@pytest.mark.parametrize("importance", [False, True])
def test_sapo_agrees_with_its_definition(dtype: torch.dtype, level: str, importance: bool) -> None:
    options = {"ratio_level": level, "kl_importance": importance}
    agrees(sapo_loss, gated(1, 1.05), dtype, "grpo", 5, 0.3, **options)
    taus = {"tau_positive": 0.5, "tau_negative": 3.0}
    agrees(sapo_loss, gated(0.5, 3), dtype, "dapo", 6, 0.3, **taus, **options)


def test_the_weights_of_the_sampler_correction_do_not_touch_the_penalty() -> None:
    policy, old, reference, advantages, weights, mask = batch()
    options = {"normalizer": 3, "kl_beta": 0.3, "reference_logprobs": reference}
    found = grpo_loss(
        policy, old, advantages, mask, sampling_weights=torch.zeros_like(weights), **options
    )
    assert found.loss.item() == pytest.approx(0.3 * found.kl_reference.item())
    assert found.kl_reference.item() > 0


def test_weights_may_be_one_per_sequence() -> None:
    policy, old, _, advantages, _, mask = batch()
    per_sequence = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    shapes = (per_sequence, per_sequence.unsqueeze(-1), per_sequence.unsqueeze(-1).expand(4, 6))
    found = [
        grpo_loss(policy, old, advantages, mask, normalizer=3, sampling_weights=w).loss.item()
        for w in shapes
    ]
    assert found[0] == found[1] == found[2]


def test_a_penalty_of_weight_zero_needs_no_reference_and_is_not_reported() -> None:
    policy, old, _, advantages, _, mask = batch()
    assert grpo_loss(policy, old, advantages, mask, normalizer=3).kl_reference is None
    with pytest.raises(ValueError, match=r"kl_beta is 0.1 but reference_logprobs is None: pass"):
        grpo_loss(policy, old, advantages, mask, normalizer=3, kl_beta=0.1)


def test_cispo_keeps_the_gradient_of_tokens_that_grpo_clips_away() -> None:
    policy, old = torch.zeros(1, 1, requires_grad=True), torch.tensor([[-3.0]])
    good, mask = torch.ones(1), torch.ones(1, 1, dtype=torch.bool)
    (gone,) = torch.autograd.grad(grpo_loss(policy, old, good, mask, normalizer=1).loss, policy)
    found = cispo_loss(policy, old, good, mask, normalizer=1)
    (kept,) = torch.autograd.grad(found.loss, policy)
    assert (gone.item(), kept.item()) == (0, -5)
    assert found.clipped_fraction.item() == 1


@every_kind
def test_an_aggregation_of_ones_is_the_share_of_what_it_counts(kind: str) -> None:
    mask = batch(rows=5, seed=3)[-1]
    normalizer = aggregation_normalizer(
        kind, sequences=5, tokens=int(mask.sum()), max_completion_length=10
    )
    found = aggregate(torch.ones(5, 6, dtype=torch.float64), mask, kind, normalizer).item()
    share = {"grpo": int(mask.any(-1).sum()) / 5, "dr_grpo": int(mask.sum()) / 50}
    share["luspo"] = int(mask.sum()) / 5
    assert found == pytest.approx(share.get(kind, 1.0))


def test_dr_grpo_needs_the_length_that_it_divides_by() -> None:
    for length in (None, 0):
        with pytest.raises(ValueError, match=f"max_completion_length is {length} but dr_grpo"):
            aggregation_normalizer("dr_grpo", sequences=2, tokens=3, max_completion_length=length)


@pytest.mark.parametrize(
    ("loss", "changed", "message"),
    [
        (grpo_loss, {"kl_beta": -0.1}, "kl_beta is -0.1 but must be >= 0: use 0"),
        (grpo_loss, {"kl_beta": math.nan}, "kl_beta is nan"),
        (cispo_loss, {"clip_high": -0.5}, "clip_high is -0.5 but must be >= 0: use 0.2"),
        (cispo_loss, {"clip_low": 1.5}, r"clip_low is 1.5 but must be in \[0, 1\]"),
        (sapo_loss, {"tau_positive": 0.0}, "tau_positive is 0.0 but must be > 0: use 1.0"),
        (sapo_loss, {"tau_negative": -1.0}, "tau_negative is -1.0 but must be > 0: use 1.05"),
        (
            grpo_loss,
            {"sampling_weights": torch.ones(3)},
            r"sampling_weights have shape \(3,\) but log-probs \(4, 6\)",
        ),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    loss: Callable[..., PolicyLoss], changed: dict[str, Any], message: str
) -> None:
    policy, old, _, advantages, _, mask = batch()
    with pytest.raises(ValueError, match=message):
        loss(policy, old, advantages, mask, normalizer=5, **changed)


def test_an_unknown_choice_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="aggregation is 'mean': use 'grpo' or 'dapo'"):
        check_choice("aggregation", "mean", ("grpo", "dapo"))
    policy, old, _, advantages, _, mask = batch()
    with pytest.raises(TypeCheckError):
        grpo_loss(policy, old, advantages, mask, normalizer=5, aggregation="mean")


def test_the_library_clips_where_a_config_does_by_default() -> None:
    defaults = {name: one.default for name, one in signature(grpo_loss).parameters.items()}
    assert (defaults["clip_low"], defaults["clip_high"]) == (
        GrpoLoss().clip_low,
        GrpoLoss().clip_high,
    )


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def four_tensors(
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
    policy, behaviour, advantages, mask = four_tensors(rows=4, tokens=6, seed=7)
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
        ({"normalizer": -1}, "normalizer is -1 but must be a finite count"),
        ({"normalizer": math.nan}, "normalizer is nan"),
        ({"clip_low": 1.5}, r"clip_low is 1.5 but must be in \[0, 1\]: use 0.2"),
        ({"clip_high": -0.1}, "clip_high is -0.1 but must be >= 0"),
        ({"ratio_cap": 0.0}, "ratio_cap is 0.0 but must be > 0"),
    ],
)
def test_an_impossible_grpo_is_named_with_its_bound(
    changed: dict[str, float], message: str
) -> None:
    settings_ = {"normalizer": 5, **CLIP, **changed}
    with pytest.raises(ValueError, match=message):
        grpo_loss(*four_tensors(), **settings_)


def test_advantages_of_another_shape_are_an_error_that_names_both_shapes() -> None:
    policy, behaviour, _, mask = four_tensors()
    with pytest.raises(ValueError, match=r"shape \(1,\) but log-probs \(3, 5\)"):
        grpo_loss(policy, behaviour, torch.zeros(1), mask, normalizer=5, **CLIP)


def test_the_shapes_in_the_signatures_are_checked_in_these_tests() -> None:
    with pytest.raises(TypeCheckError):
        token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    policy, behaviour, advantages, mask = four_tensors()
    with pytest.raises(TypeCheckError):
        grpo_loss(policy, behaviour, advantages, mask.long(), normalizer=5, **CLIP)


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
