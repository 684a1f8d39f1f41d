"""Decoupled PPO against a definition written sequence by sequence, and both its rejections."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.policy import Rejection, decoupled_ppo_loss, grpo_loss

TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (5e-5, 2e-6)}
RATIOS = [("ratio", 1.5, None), ("ratio", 1.4, 0.7)]
KLS = [("kl_k1", 0.3, -0.2), ("kl_k2", 0.2, None), ("kl_k3", 0.2, 0.001)]


def batch(rows: int = 5, tokens: int = 6, seed: int = 0, scale: float = 0.5) -> list[Tensor]:
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


def agrees(
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
every_type = pytest.mark.parametrize("dtype", TOLERANCES)


@every_type
@every_level
@pytest.mark.parametrize("dual", [None, 1.5])
def test_without_rejection_it_is_ppo_around_the_proximal_policy(
    dtype: torch.dtype, level: str, dual: float | None
) -> None:
    values = batch(seed=1)
    agrees(values, None, level, dual, dtype)
    far = [*values[:2], values[2] - 5, *values[3:]]
    agrees(far, None, level, dual, dtype)


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
    agrees(batch(seed=2), rule, level, 1.5, dtype, rejection=rule)


@every_type
@pytest.mark.parametrize("cap", [0.9, 1.5, math.inf])
def test_the_older_cap_drops_tokens_beyond_it(dtype: torch.dtype, cap: float) -> None:
    rule = Rejection(upper=cap)
    agrees(batch(seed=3), rule, "token", None, dtype, rejection=rule)


def test_a_token_beyond_the_cap_has_weight_zero_and_is_not_held_at_the_cap() -> None:
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    sampling = torch.tensor([[-1.0, -2.0]])
    found = decoupled_ppo_loss(
        zero, zero, sampling, torch.ones(1), mask, normalizer=2, rejection=Rejection()
    )
    assert found.loss.item() == pytest.approx(-math.e / 2)
    assert found.filtered_fraction.item() == 0.5


def test_rejection_makes_the_update_smaller_and_not_the_rest_heavier() -> None:
    policy, proximal, sampling, advantages, mask = batch(seed=4)
    rule = Rejection(upper=1.0 + 1e-9)
    found = decoupled_ppo_loss(
        policy, proximal, sampling, advantages, mask, normalizer=7, rejection=rule
    )
    kept = mask & (proximal <= sampling)
    assert 0 < int(kept.sum()) < int(mask.sum())
    alone = decoupled_ppo_loss(
        policy, proximal, sampling, advantages, kept, normalizer=7, rejection=rule
    )
    assert found.loss.item() == alone.loss.item()
    assert found.filtered_fraction.item() == pytest.approx(int((mask & ~kept).sum()) / 7)


@every_level
def test_without_rejection_and_dual_clip_it_is_grpo_whatever_the_sampler_says(level: Any) -> None:
    policy, proximal, sampling, advantages, mask = batch(seed=5)
    advantage = advantages[:, 0]
    expected = grpo_loss(
        policy, proximal, advantage, mask, normalizer=7, ratio_level=level, clip_high=0.2
    )
    for behaviour in (sampling, sampling - 20):
        found = decoupled_ppo_loss(
            policy, proximal, behaviour, advantage, mask, normalizer=7, ratio_level=level
        )
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
        assert found.filtered_fraction.item() == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("metric", ["ratio", "kl_k1", "kl_k2", "kl_k3"])
def test_equal_policies_pass_every_rejection_with_weight_one(level: Any, metric: Any) -> None:
    policy, proximal, _, advantages, mask = batch(seed=6)
    rule = Rejection(level, "mask", metric, "max", 1.1)
    plain = decoupled_ppo_loss(policy, proximal, proximal, advantages, mask, normalizer=7)
    found = decoupled_ppo_loss(
        policy, proximal, proximal, advantages, mask, normalizer=7, rejection=rule
    )
    assert torch.equal(found.loss, plain.loss)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": "clamp", "metric": "kl_k2"}, "action is 'clamp' but metric is 'kl_k2'"),
        ({"upper": 0.0}, "upper is 0.0 but has to be > 0 for metric 'ratio'"),
        ({"metric": "kl_k3", "upper": -1}, "upper is -1 but has to be > 0 for metric 'kl_k3'"),
        ({"metric": "kl_k1", "upper": math.nan}, "upper is nan"),
        ({"lower": 6.0}, "lower is 6.0 but has to be <= upper, 5.0"),
        ({"lower": 0.0}, "lower is 0.0 but has to be <= upper, 5.0, and > 0 for a ratio"),
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
        ({"dual_clip": 1.0}, "dual_clip is 1.0 but has to be > 1: use 3.0"),
        ({"clip_low": 1.5}, r"clip_low is 1.5 but has to be in \[0, 1\]"),
    ],
)
def test_an_impossible_setting_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoupled_ppo_loss(*batch(), normalizer=5, **changed)
