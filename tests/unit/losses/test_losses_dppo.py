"""PRIME-RL's loss and DPPO against definitions written token by token.

Decoupled PPO against a definition written sequence by sequence, and both its rejections.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.policy import (
    PolicyLoss,
    Rejection,
    decoupled_ppo_loss,
    dppo_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
)

TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (5e-5, 2e-6)}


Drop = Callable[[float, float, float], bool]


every_type = pytest.mark.parametrize("dtype", TOLERANCES)


every_scale = pytest.mark.parametrize("scale", [0.5, 50.0])


def batch(seed: int = 0, scale: float = 0.5, rows: int = 5, tokens: int = 8) -> list[Tensor]:
    """Log-probs of policy and sampler, per-token advantages, weights and a mask, in float64."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    policy = -scale * uniform(rows, tokens)
    sampling = -scale * uniform(rows, tokens)
    advantages = torch.randn(rows, tokens, generator=rng, dtype=torch.float64)
    advantages[:, :2] = 0.0
    weights, mask = uniform(rows, tokens), torch.rand(rows, tokens, generator=rng) < 0.7
    mask[:1] = False
    return [policy.requires_grad_(), sampling, advantages, weights, mask]


def binary_tv(p: float, q: float) -> float:
    return abs(p - q)


def binary_kl(p: float, q: float) -> float:
    others = (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return q * (math.log(q) - math.log(p)) + others


def moves_away(p: float, q: float, a: float) -> bool:
    return p > q if a > 0 else p < q


def prime_by_hand(values: list[Tensor], drop: Drop, adv_tau: float, kl_tau: float) -> Tensor:
    policy, sampling, advantages, weights, mask = values
    total = policy.sum() * 0
    for b, t in mask.nonzero().tolist():
        a, gap = advantages[b, t].item(), policy[b, t] - sampling[b, t]
        keep = not drop(policy[b, t].exp().item(), sampling[b, t].exp().item(), a)
        total = total + weights[b, t] * (kl_tau * gap**2 - keep * adv_tau * a * gap.exp())
    return total


def dppo_by_hand(values: list[Tensor], drop: Drop, cap: float) -> Tensor:
    policy, sampling, advantages, _, mask = values
    total = policy.sum() * 0
    for b, t in mask.nonzero().tolist():
        a, p, q = advantages[b, t].item(), policy[b, t].exp().item(), sampling[b, t].exp().item()
        if not drop(p, q, a):
            total = total - min(p / q, cap) * a * policy[b, t]
    return total


def agrees(
    found: Callable[[list[Tensor]], PolicyLoss],
    expected: Callable[[list[Tensor]], Tensor],
    dtype: torch.dtype,
    values: list[Tensor],
) -> None:
    # Decisions at a threshold are taken on the same numbers: those that float32 can hold.
    rounded = [v.detach().to(dtype).double() if v.is_floating_point() else v for v in values]
    wanted = expected([rounded[0].requires_grad_(), *rounded[1:]]) / 7
    (slope,) = torch.autograd.grad(wanted, rounded[0])
    cast = [v.detach().to(dtype) if v.is_floating_point() else v for v in rounded]
    loss = found([cast[0].requires_grad_(), *cast[1:]]).loss
    (gradient,) = torch.autograd.grad(loss, cast[0])
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(loss, wanted.to(dtype), rtol=rtol, atol=atol)
    torch.testing.assert_close(gradient, slope.to(dtype), rtol=rtol, atol=atol)


@every_type
@every_scale
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.05, 0.1)])
def test_the_prime_rl_loss_agrees_with_its_definition(
    dtype: torch.dtype, scale: float, low: float, high: float
) -> None:
    options = {"mask_low": low, "mask_high": high, "adv_tau": 0.7, "kl_tau": 0.01}
    agrees(
        lambda v: prime_rl_loss(*v[:3], v[4], normalizer=7, sampling_weights=v[3], **options),
        lambda v: prime_by_hand(
            v, lambda p, q, a: p - q > high if a > 0 else p - q < -low, 0.7, 0.01
        ),
        dtype,
        batch(1, scale),
    )


@every_type
@every_scale
def test_the_symmetric_variant_drops_in_both_directions(dtype: torch.dtype, scale: float) -> None:
    agrees(
        lambda v: prime_rl_ipo_loss(*v[:3], v[4], normalizer=7, sampling_weights=v[3]),
        lambda v: prime_by_hand(v, lambda p, q, a: abs(p - q) > 0.1, 1.0, 1e-3),
        dtype,
        batch(2, scale),
    )


@every_type
@every_scale
@pytest.mark.parametrize("cap", [2.0, 10.0])
@pytest.mark.parametrize(
    ("kind", "size", "low", "high"),
    [("tv", binary_tv, 0.15, None), ("kl", binary_kl, 0.05, None), ("tv", binary_tv, 0.1, 0.02)],
)
def test_dppo_agrees_with_its_definition(
    dtype: torch.dtype, scale: float, cap: float, kind: Any, size: Any, low: float, high: Any
) -> None:
    def drop(p: float, q: float, a: float) -> bool:
        bound = high if high is not None and a > 0 else low
        return size(p, q) > bound and moves_away(p, q, a)

    agrees(
        lambda v: dppo_loss(
            *v[:3],
            v[4],
            normalizer=7,
            divergence=kind,
            threshold=low,
            threshold_high=high,
            ratio_cap=cap,
        ),
        lambda v: dppo_by_hand(v, drop, cap),
        dtype,
        batch(3, scale),
    )


def ratio_distance(p: float, c: float) -> float:
    return abs(p / c - 1)


@pytest.mark.parametrize(
    ("kind", "size", "bound"),
    [("tv", binary_tv, 0.1), ("kl", binary_kl, 0.02), ("ratio", ratio_distance, 0.2)],
)
def test_recomputed_log_probs_move_the_trust_region_and_not_the_ratio(
    kind: Any, size: Any, bound: float
) -> None:
    policy, sampling, advantages, weights, mask = batch(6, 1.0)
    old = batch(7, 1.0)[1]
    total = policy.sum() * 0
    for b, t in mask.nonzero().tolist():
        p, q, c = (x[b, t].exp().item() for x in (policy, sampling, old))
        a = advantages[b, t].item()
        if not (size(p, c) > bound and moves_away(p, c, a)):
            total = total - weights[b, t] * min(p / q, 10.0) * a * policy[b, t]
    (slope,) = torch.autograd.grad(total / 7, policy)
    found = dppo_loss(
        policy,
        sampling,
        advantages,
        mask,
        normalizer=7,
        divergence=kind,
        threshold=bound,
        old_logprobs=old,
        sampling_weights=weights,
    ).loss
    torch.testing.assert_close(found, total / 7, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.autograd.grad(found, policy)[0], slope, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "threshold"), [("tv", 0.15), ("kl", 0.05), ("ratio", 0.2)])
def test_the_default_thresholds_are_those_of_the_paper(kind: Any, threshold: float) -> None:
    policy, sampling, advantages, _, mask = batch(4, 2.0)
    default = dppo_loss(policy, sampling, advantages, mask, normalizer=7, divergence=kind)
    stated = dppo_loss(
        policy, sampling, advantages, mask, normalizer=7, divergence=kind, threshold=threshold
    )
    assert torch.equal(default.loss, stated.loss)
    assert 0 < default.clipped_fraction.item() == stated.clipped_fraction.item()


def test_dppo_without_a_cap_has_the_gradient_of_the_ratio() -> None:
    policy, sampling, advantages, _, mask = batch(5, 1.0)
    free = dppo_loss(policy, sampling, advantages, mask, normalizer=7, threshold=1, ratio_cap=None)
    ratio = prime_rl_loss(
        policy, sampling, advantages, mask, normalizer=7, mask_low=1, mask_high=1, kl_tau=0
    )
    slopes = [torch.autograd.grad(found.loss, policy)[0] for found in (free, ratio)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)


def test_a_token_at_the_threshold_stays() -> None:
    policy, sampling = torch.zeros(1, 1), torch.full((1, 1), math.log(0.5))
    mask = torch.ones(1, 1).bool()
    for high, dropped in ((0.5, 0), (0.49, 1)):
        found = prime_rl_loss(policy, sampling, torch.ones(1), mask, normalizer=1, mask_high=high)
        assert found.clipped_fraction.item() == dropped


@pytest.mark.parametrize(
    ("loss", "changed", "message"),
    [
        (prime_rl_loss, {"mask_low": -0.1}, "mask_low is -0.1 but must be >= 0: use 0.2"),
        (prime_rl_loss, {"mask_high": math.nan}, "mask_high is nan but must be >= 0"),
        (prime_rl_loss, {"adv_tau": -1}, "adv_tau is -1 but must be >= 0: use 1.0"),
        (prime_rl_loss, {"kl_tau": -1}, "kl_tau is -1 but must be >= 0: use 1e-3"),
        (prime_rl_loss, {"teacher_tau": -1}, "teacher_tau is -1 but must be >= 0: use 1.0"),
        (prime_rl_loss, {"teacher_tau": 1}, "teacher_tau is 1 but reference_logprobs is None"),
        (prime_rl_ipo_loss, {"threshold": -1}, "threshold is -1 but must be >= 0: use 0.1"),
        (dppo_loss, {"threshold": -1}, "threshold is -1 but must be >= 0: use 0.15"),
        (dppo_loss, {"threshold_high": -1}, "threshold_high is -1 but must be >= 0"),
        (dppo_loss, {"ratio_cap": 0}, "ratio_cap is 0 but must be > 0: use 10.0"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    loss: Callable[..., PolicyLoss], changed: dict[str, float], message: str
) -> None:
    policy, sampling, advantages, _, mask = batch()
    with pytest.raises(ValueError, match=message):
        loss(policy, sampling, advantages, mask, normalizer=5, **changed)


RATIOS = [("ratio", 1.5, None), ("ratio", 1.4, 0.7)]


KLS = [("kl_k1", 0.3, -0.2), ("kl_k2", 0.2, None), ("kl_k3", 0.2, 0.001)]


def three_policies(
    rows: int = 5, tokens: int = 6, seed: int = 0, scale: float = 0.5
) -> list[Tensor]:
    """Log-probs of policy, proximal and sampler, per-token advantages and a mask, in float64."""
    rng = torch.Generator().manual_seed(seed)

    def near(values: Tensor) -> Tensor:
        return values + scale * torch.randn(rows, tokens, generator=rng, dtype=torch.float64)

    policy = -3 * torch.rand(rows, tokens, generator=rng, dtype=torch.float64)
    proximal = near(policy)
    mask = torch.rand(rows, tokens, generator=rng) < 0.7
    mask[:1] = False
    return [policy.requires_grad_(), proximal, near(proximal), near(policy * 0), mask]


def metric_of(gap: float, name: str) -> float:
    known = {"kl_k1": gap, "kl_k2": gap**2 / 2, "kl_k3": math.exp(-gap) - 1 + gap}
    return known.get(name, gap)


def weights_by_hand(gaps: list[float], rule: Rejection | None) -> list[float | None]:
    """Weight of each masked token of one sequence, None for a dropped one."""
    if rule is None:
        return [1.0] * len(gaps)
    metrics, weights = [metric_of(g, rule.metric) for g in gaps], [math.exp(g) for g in gaps]
    if rule.level == "sequence" and gaps:
        reduce = {"mean": lambda x: math.fsum(x) / len(x), "sum": math.fsum, "max": max}[rule.agg]
        metrics = [reduce(metrics)] * len(gaps)
        if rule.metric == "ratio":
            weights = [math.exp(math.fsum(gaps) / len(gaps))] * len(gaps)
    if rule.metric == "ratio":
        metrics = [math.exp(m) for m in metrics]
    bottom = -math.inf if rule.lower is None else rule.lower
    inside = [bottom <= m <= rule.upper for m in metrics]
    if rule.action == "mask":
        return [w if ok else None for w, ok in zip(weights, inside, strict=True)]
    held = [min(max(w, rule.lower or 0), rule.upper) for w in weights]
    return [w if ok else h for w, h, ok in zip(weights, held, inside, strict=True)]


def by_hand(values: list[Tensor], rule: Rejection | None, level: str, dual: float | None) -> Tensor:
    """The sum of the terms with a clip of [0.8, 1.3], one sequence at a time."""
    policy, proximal, sampling, advantages, mask = values
    total = policy.sum() * 0
    for b in range(len(policy)):
        on = [t for t in range(policy.shape[1]) if mask[b, t]]
        weights = weights_by_hand([(proximal[b, t] - sampling[b, t]).item() for t in on], rule)
        left = {t: w for t, w in zip(on, weights, strict=True) if w is not None}
        for t, w in left.items():
            members = left if level == "sequence" else [t]
            gap = sum((policy[b, m] - proximal[b, m] for m in members), start=policy.sum() * 0)
            a = math.fsum(advantages[b, m].item() for m in members) / len(members)
            r = (gap / len(members)).exp()
            held = min(max(r.item(), 0.8), 1.3)
            term = -a * r if -a * r.item() >= -a * held else r.detach() * 0 - a * held
            if dual is not None and term.item() > dual * abs(a):
                term = r.detach() * 0 + dual * abs(a)
            total = total + w * term
    return total


def decoupled_agrees(
    values: list[Tensor],
    rule: Rejection | None,
    level: Any,
    dual: float | None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    wanted = by_hand(values, rule, level, dual) / 7
    (slope,) = torch.autograd.grad(wanted, values[0])
    cast = [v.detach().to(dtype) if v.is_floating_point() else v for v in values]
    cast[0].requires_grad_()
    found = decoupled_ppo_loss(
        *cast, normalizer=7, clip_high=0.3, dual_clip=dual, ratio_level=level, **options
    ).loss
    found.backward()
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(found, wanted.to(dtype), rtol=rtol, atol=atol)
    torch.testing.assert_close(cast[0].grad, slope.to(dtype), rtol=rtol, atol=atol)


every_level = pytest.mark.parametrize("level", ["token", "sequence"])


@every_type
@every_level
@pytest.mark.parametrize("dual", [None, 1.5])
def test_without_rejection_it_is_ppo_around_the_proximal_policy(
    dtype: torch.dtype, level: str, dual: float | None
) -> None:
    values = three_policies(seed=1)
    decoupled_agrees(values, None, level, dual, dtype)
    far = [*values[:2], values[2] - 5, *values[3:]]
    decoupled_agrees(far, None, level, dual, dtype)


@every_type
@every_level
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("agg", ["mean", "sum", "max"])
@pytest.mark.parametrize(
    ("action", "bounds"), [("mask", b) for b in RATIOS + KLS] + [("clamp", b) for b in RATIOS]
)
def test_rejection_agrees_with_its_definition(
    dtype: torch.dtype, level: str, scope: Any, agg: Any, action: Any, bounds: Any
) -> None:
    metric, upper, lower = bounds
    rule = Rejection(scope, action, metric, agg, upper, lower)
    decoupled_agrees(three_policies(seed=2), rule, level, 1.5, dtype, rejection=rule)


@every_type
@pytest.mark.parametrize("cap", [0.9, 1.5, math.inf])
def test_the_older_cap_drops_tokens_beyond_it(dtype: torch.dtype, cap: float) -> None:
    rule = Rejection(upper=cap)
    decoupled_agrees(three_policies(seed=3), rule, "token", None, dtype, rejection=rule)


def test_a_token_beyond_the_cap_has_weight_zero_and_is_not_held_at_the_cap() -> None:
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    sampling = torch.tensor([[-1.0, -2.0]])
    found = decoupled_ppo_loss(
        zero, zero, sampling, torch.ones(1), mask, normalizer=2, rejection=Rejection()
    )
    assert found.loss.item() == pytest.approx(-math.e / 2)
    assert found.filtered_fraction.item() == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": "clamp", "metric": "kl_k2"}, "action is 'clamp' but metric is 'kl_k2'"),
        ({"upper": 0.0}, "upper is 0.0 but must be > 0 for metric 'ratio'"),
        ({"metric": "kl_k3", "upper": -1}, "upper is -1 but must be > 0 for metric 'kl_k3'"),
        ({"metric": "kl_k1", "upper": math.nan}, "upper is nan"),
        ({"lower": 6.0}, "lower is 6.0 but must be <= upper, 5.0"),
        ({"lower": 0.0}, "lower is 0.0 but must be <= upper, 5.0, and > 0 for a ratio"),
    ],
)
def test_an_impossible_rejection_is_named_with_its_bound(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Rejection(**fields)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip is 1.0 but must be > 1: use 3.0"),
        ({"clip_low": 1.5}, r"clip_low is 1.5 but must be in \[0, 1\]"),
    ],
)
def test_an_impossible_setting_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoupled_ppo_loss(*three_policies(), normalizer=5, **changed)
