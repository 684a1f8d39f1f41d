"""AReaL's decoupled PPO: clipped around a proximal policy, weighted against the sampling policy.

Axes: B sequences (any number of leading axes, also none), T tokens. One sequence per row.

Three policies: `logprobs` of the one in training, `proximal_logprobs` of the one that the trust
region is around, `sampling_logprobs` of the one that sampled the tokens, maybe many updates ago.
The caller computes or interpolates the proximal one.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.grpo import clip_binds
from composer_mesh.losses.logprobs import (
    KlEstimator,
    PolicyLoss,
    RatioLevel,
    Reducer,
    estimate_kl,
    importance_ratio,
    masked_advantages,
    masked_log_ratio,
    masked_mean,
    mean_advantages,
    policy_loss,
)
from composer_mesh.losses.reductions import Number, Reduction, check_choice, check_clip


@dataclass(frozen=True)
class Rejection:
    """Rejection of tokens whose proximal policy is far from the one that sampled them.

    g = proximal_logprobs - sampling_logprobs. `metric` per token is exp(g) ("ratio") or an estimate
    of the KL: g ("kl_k1"), g^2 / 2 ("kl_k2"), exp(-g) - 1 + g ("kl_k3"). With level "sequence" one
    number of the masked tokens counts for all of them: `agg` "mean", "sum" or "max", for the ratio
    of g and then exp (a geometric mean), for a KL of the metric itself.

    Out of bounds is metric > upper or, if `lower` is set, metric < lower. Action "mask" drops such
    tokens, "clamp" (metric "ratio" only) clamps their weight to [lower or 0, upper]. The remaining
    tokens are weighted by exp(g), with level "sequence" and metric "ratio" by exp(mean g).

    Fields and defaults are those of AReaL's RejectionSamplingConfig (4aef98d8); so are the bounds
    with one exception: there a ratio's `upper` must be > 1, here > 0 as for the older cap.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    agg: Literal["sum", "mean", "max"] = "mean"
    upper: Number = 5.0
    lower: Number | None = None

    def __post_init__(self) -> None:
        check_choice("level", self.level, ("token", "sequence"))
        check_choice("action", self.action, ("mask", "clamp"))
        check_choice("metric", self.metric, ("ratio", "kl_k1", "kl_k2", "kl_k3"))
        check_choice("agg", self.agg, ("sum", "mean", "max"))
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"action is 'clamp' but metric is {self.metric!r}: only a ratio is a weight that"
                " can be held; use metric 'ratio' or action 'mask'"
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        floor = -torch.inf if self.metric == "kl_k1" else 0
        if not self.upper > floor:
            raise ValueError(
                f"upper is {self.upper} but must be > {floor} for metric {self.metric!r}, or no"
                " update would survive: use 5.0 for a ratio, 0.5 to 2 for a KL"
            )
        if self.lower is None:
            return
        if not self.lower <= self.upper or (self.metric == "ratio" and not self.lower > 0):
            raise ValueError(
                f"lower is {self.lower} but must be <= upper, {self.upper}, and > 0 for a ratio:"
                " use 0.5, or None for no lower bound"
            )


@dataclass(frozen=True)
class _Filtered:
    """Result of a rejection: remaining tokens, their weights, rejected or clamped tokens."""

    mask: Bool[Tensor, "*B T"]
    weights: Float[Tensor, "*B T"]
    touched: Bool[Tensor, "*B T"]


def decoupled_ppo_loss(
    logprobs: Float[Tensor, "*B T"],
    proximal_logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    rejection: Rejection | None = None,
    ratio_level: RatioLevel = "token",
) -> PolicyLoss:
    """Decoupled PPO objective of AReaL (arXiv 2505.24298, after arXiv 2110.00641).

        r    = exp(logprobs - proximal_logprobs)
        l    = max(-A r, -A clip(r, 1 - low, 1 + high)), with dual_clip c: min(l, c |A|)
        w    = exp(proximal_logprobs - sampling_logprobs)
        loss = sum of w l over the masked tokens that rejection leaves / normalizer

    `advantages` is one number per sequence [*B] or per token [*B T]; only `logprobs` gets a
    gradient. `normalizer` counts the tokens of the step *before* rejection, which therefore makes
    updates smaller and not the remaining tokens heavier. ratio_level "sequence" is GSPO: the
    geometric mean of r over the tokens that rejection leaves, with their mean advantage;
    "sequence_token" has the gradient of GSPO-token, with each token's own advantage. `reduction`
    "none" returns w l per token and reads no normalizer.

    `rejection` is AReaL's since 2026. **None applies no weight at all**, also when the proximal
    policy is not the sampler's: then this is PPO around the proximal policy. AReaL's former
    behav_imp_weight_cap, by which tokens with w > cap get weight 0 and are not clamped to the cap,
    is `Rejection(upper=cap)`, with inf for "weights without a cap".

    `clipped_fraction` counts remaining tokens that the clip binds, `filtered_fraction` those that
    rejection dropped or held.

    Source: AReaL `utils/functional/functional.py::ppo_actor_loss_fn` and
    `apply_rejection_sampling` (4aef98d8; eps_clip, eps_clip_higher, c_clip,
    importance_sampling_level), and realhf `ppo_functional.py::actor_loss_fn` (c0200f10;
    behav_imp_weight_cap). Differs from them: w is computed in the inputs' precision, upstream in
    float32; values outside of the mask may be NaN; log-ratios beyond +-80 (float64: 700) count as
    that, upstream takes a w that is not finite for 1.
    """
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip} but must be > 1: use 3.0, or None for no dual clip"
        )
    kept = _filtered(proximal_logprobs, sampling_logprobs, mask, rejection)
    log_ratio = masked_log_ratio(logprobs, proximal_logprobs, kept.mask)
    ratio = importance_ratio(log_ratio, kept.mask, ratio_level)
    spread = mean_advantages if ratio_level == "sequence" else masked_advantages
    advantage = spread(advantages, logprobs, kept.mask)
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(-advantage * ratio, -advantage * held)
    if dual_clip is not None:
        terms = torch.minimum(terms, dual_clip * advantage.abs())
    found = policy_loss(
        Reducer(kept.mask, "dapo", normalizer, reduction),
        terms * kept.weights,
        clipped=clip_binds(ratio, advantage, clip_low, clip_high),
        ratio=ratio,
        log_ratio=log_ratio,
    )
    touched = Reducer(mask, "dapo", normalizer, reduction)(kept.touched.to(terms.dtype))
    return replace(found, filtered_fraction=touched)


def _filtered(
    proximal: Float[Tensor, "*B T"],
    sampling: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    rejection: Rejection | None,
) -> _Filtered:
    gap = masked_log_ratio(proximal.detach(), sampling, mask)
    if rejection is None:
        return _Filtered(mask, torch.ones_like(gap), torch.zeros_like(mask))
    weights = gap.exp()
    if rejection.level == "sequence" and rejection.metric == "ratio":
        weights = masked_mean(gap, mask).exp().expand_as(gap)
    outside = _outside(gap, mask, rejection)
    if rejection.action == "mask":
        return _Filtered(mask & ~outside, weights, mask & outside)
    held = weights.clamp(min=rejection.lower or 0.0, max=rejection.upper)
    held = torch.where(outside, held, weights)
    return _Filtered(mask, held, mask & (held != weights))


def _outside(
    gap: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"], rejection: Rejection
) -> Bool[Tensor, "*B T"]:
    """Return the tokens that are out of bounds, alone or with their sequence."""
    metric = _metric(gap, rejection.metric)
    if rejection.level == "sequence":
        metric = _per_sequence(metric, mask, rejection.agg)
    if rejection.metric == "ratio":
        metric = metric.exp()
    outside = metric > rejection.upper
    if rejection.lower is not None:
        outside = outside | (metric < rejection.lower)
    return outside.expand_as(mask)


def _metric(gap: Float[Tensor, "*B T"], name: str) -> Float[Tensor, "*B T"]:
    """Return the metric of each token; for the ratio, its logarithm."""
    estimators: dict[str, KlEstimator] = {"kl_k2": "k2", "kl_k3": "k3"}
    return estimate_kl(gap, estimators.get(name, "k1"))


def _per_sequence(
    values: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"], agg: str
) -> Float[Tensor, "*B 1"]:
    """Reduce the masked tokens to one number per sequence; 0 for a sequence without any."""
    if agg == "mean":
        return masked_mean(values, mask)
    if agg == "sum" or not values.shape[-1]:
        return torch.where(mask, values, 0.0).sum(-1, keepdim=True)
    some = mask.any(-1, keepdim=True)
    top = torch.where(mask, values, -torch.inf).amax(-1, keepdim=True)
    return torch.where(some, top, 0.0)
