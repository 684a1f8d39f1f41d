"""DPPO: a trust region that drops tokens, around the policy that sampled or a recomputed one.

Axes: B sequences or packed rows (any number of leading axes, also none), T tokens.

A token is dropped from the policy gradient when it has moved too far away from the centre of the
trust region in the direction that the advantage pushes. What is far is a divergence: of the sampled
token against all others ("binary"), of the sampler's top-k, or the ratio.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, Reducer, Reduction, policy_loss
from composer_mesh.losses.checks import check_choice, check_not_negative, check_positive
from composer_mesh.losses.logprobs import (
    PolicyLoss,
    masked_advantages,
    masked_log_ratio,
    probability_gap,
    selected,
    weighted_terms,
)
from composer_mesh.losses.reductions import Number, at_least_float32

Divergence = Literal["tv", "kl", "ratio", "topk_tv", "topk_kl"]
DIVERGENCES = ("tv", "kl", "ratio", "topk_tv", "topk_kl")
THRESHOLDS = {"tv": 0.15, "kl": 0.05, "ratio": 0.2, "topk_tv": 0.15, "topk_kl": 0.05}


def dppo_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    divergence: Divergence = "tv",
    threshold: Number | None = None,
    threshold_high: Number | None = None,
    ratio_cap: Number | None = 10.0,
    old_logprobs: Float[Tensor, "*B T"] | None = None,
    token_divergences: Float[Tensor, "*B T"] | None = None,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """DPPO (arXiv 2602.04879): tokens outside a trust region have no policy gradient.

        p = exp(logprobs)    q = exp(sampling_logprobs)
        c = exp(old_logprobs) where these are given, else q: the centre of the trust region
        tv       D = |p - c|
        kl       D = c log(c / p) + (1 - c) log((1 - c + 1e-8) / (1 - p + 1e-8)), in nats
        ratio    D = |p / c - 1|
        topk_*   D = token_divergences, `topk_divergences` of the sampler's top-k
        drop     D > threshold and p moves away: p > c where A > 0, p < c elsewhere
        l        -[not drop] A stop_gradient(min(p / q, ratio_cap)) logprobs

    `threshold` defaults to the paper's .15 for tv and .05 for kl, and to .2 for the ratio;
    `threshold_high` is that of tokens with A > 0, by default the same. `ratio_cap` None is no
    bound. `old_logprobs`, the trainer's own recomputed log-probs, move the trust region only: the
    ratio stays against the policy that sampled. `sampling_weights` multiply l, one per token or
    sequence. `reduction` "none" returns l per token and reads no normalizer.

    `clipped_fraction` counts dropped tokens with A != 0.
    Source: Stable-RL `core_algos.py::compute_policy_loss_with_mask` (c6af1d11), whose default cap
    is 10: modes dppo_binary_tv, dppo_binary_kl, dppo_topk_tv, dppo_topk_kl, ppo (divergence
    "ratio", the mask of PPO), the *_recompute forms (with old_logprobs) and pg_no_mask (threshold
    inf). There sampling_weights (rollout_is_weights) are an argument that is not read. verl's
    dppo_tv and dppo_kl differ in a default cap of 20 and in raising ratios below exp(-20) to it.
    Differs from both: an empty mask gives 0, not NaN; values outside of the mask may be NaN.
    """
    check_choice("divergence", divergence, DIVERGENCES)
    low = THRESHOLDS[divergence] if threshold is None else threshold
    high = low if threshold_high is None else threshold_high
    check_not_negative("threshold", low, f"use {THRESHOLDS[divergence]}")
    check_not_negative("threshold_high", high, f"use {THRESHOLDS[divergence]}")
    check_positive("ratio_cap", ratio_cap, "use 10.0, or None for no bound")
    _check_divergences(divergence, token_divergences, old_logprobs)
    log_ratio = masked_log_ratio(logprobs, sampling_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    centre = sampling_logprobs if old_logprobs is None else old_logprobs
    size = _distances(logprobs, centre, mask, divergence, token_divergences)
    moved, positive = masked_log_ratio(logprobs.detach(), centre, mask), advantage > 0
    drop = torch.where(positive, (moved > 0) & (size > high), (moved < 0) & (size > low))
    ratio = log_ratio.detach().exp().clamp(max=ratio_cap or torch.inf)
    terms = torch.where(drop, 0.0, -advantage * ratio) * selected(logprobs, mask)
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=drop & (advantage != 0),
        ratio=log_ratio.detach().exp(),
        log_ratio=log_ratio,
    )


def topk_divergences(
    logprobs: Float[Tensor, "*B T K"],
    sampling_logprobs: Float[Tensor, "*B T K"],
    *,
    divergence: Literal["topk_tv", "topk_kl"] = "topk_tv",
) -> Float[Tensor, "*B T"]:
    """Divergence of the policy from the sampler on the sampler's K likeliest tokens and the rest.

        p, q     probabilities of the K tokens, and as entry K + 1 what they leave of 1
        topk_tv  sum of |p - q| / 2
        topk_kl  sum of q log(q / p), in nats

    Both log-probs are of the same K tokens, the sampler's, normalized over the whole vocabulary.
    Detached; pass it to `dppo_loss` as token_divergences. The rest counts as 1e-12 at least.
    Source: Stable-RL `workers/actor/utils.py::compute_topk_kl` (c6af1d11), in float32 there.
    """
    check_choice("divergence", divergence, ("topk_tv", "topk_kl"))
    policy, sampler = (at_least_float32(x.detach()) for x in (logprobs, sampling_logprobs))
    p, q = policy.exp(), sampler.exp()
    rest_p, rest_q = (1 - p.sum(-1)).clamp(min=1e-12), (1 - q.sum(-1)).clamp(min=1e-12)
    if divergence == "topk_tv":
        return ((p - q).abs().sum(-1) + (rest_p - rest_q).abs()) / 2
    return (q * (sampler - policy)).sum(-1) + rest_q * (rest_q.log() - rest_p.log())


def _check_divergences(
    divergence: Divergence, given: Tensor | None, old_logprobs: Tensor | None
) -> None:
    topk = divergence.startswith("topk")
    if topk and given is None:
        raise ValueError(
            f"divergence is {divergence!r} but token_divergences is None: pass what"
            " `topk_divergences` gives for the sampler's top-k, or use 'tv' or 'kl'"
        )
    if topk and old_logprobs is not None:
        raise ValueError(
            f"divergence is {divergence!r}, which is against the sampler, but old_logprobs are"
            " given: leave them out, or use 'tv', 'kl' or 'ratio'"
        )
    if given is not None and not topk:
        raise ValueError(
            f"token_divergences are given but divergence is {divergence!r}, which does not read"
            " them: use 'topk_tv' or 'topk_kl'"
        )


def _distances(
    logprobs: Float[Tensor, "*B T"],
    centre: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    divergence: Divergence,
    given: Float[Tensor, "*B T"] | None,
) -> Float[Tensor, "*B T"]:
    """Distance of each masked token from the centre of the trust region, detached."""
    if given is not None:
        return selected(given.detach(), mask)
    if divergence == "ratio":
        return (masked_log_ratio(logprobs.detach(), centre, mask).exp() - 1).abs()
    if divergence == "kl":
        return _binary_kl(selected(logprobs.detach(), mask), selected(centre.detach(), mask))
    return probability_gap(logprobs, centre, mask).abs()


def _binary_kl(
    logprobs: Float[Tensor, "*B T"], centre: Float[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """KL of the centre's Bernoulli distribution (this token or another) from the policy's."""
    p, q = logprobs.exp(), centre.exp()
    others = (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return q * (centre - logprobs) + others
