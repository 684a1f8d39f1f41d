"""DPPO: a trust region in probabilities and not in ratios, against the policy that sampled.

Axes: B sequences or packed rows (any number of leading axes, also none), T tokens.

A token is dropped from the policy gradient when its probability has moved too far away from the
sampler's in the direction that the advantage pushes. Nothing here looks at other entries of the
vocabulary: "binary" is the sampled token against all others.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, policy_loss
from composer_mesh.losses.checks import check_choice, check_not_negative, check_positive
from composer_mesh.losses.logprobs import (
    PolicyLoss,
    masked_advantages,
    masked_log_ratio,
    per_token,
    selected,
)
from composer_mesh.losses.reductions import Number

Divergence = Literal["tv", "kl"]
DIVERGENCES = ("tv", "kl")
THRESHOLDS = {"tv": 0.15, "kl": 0.05}


def prime_rl_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    mask_low: Number = 0.2,
    mask_high: Number = 0.2,
    adv_tau: Number = 1.0,
    kl_tau: Number = 1e-3,
    loss_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """PRIME-RL's default loss: DPPO with binary TV (arXiv 2602.04879) and Kimi-K2.5's penalty.

        d    = exp(logprobs) - exp(sampling_logprobs)
        drop = d > mask_high where A > 0, d < -mask_low elsewhere
        g    = logprobs - sampling_logprobs
        l    = -[not drop] adv_tau A exp(g) + kl_tau g^2
        loss = sum of l over the masked tokens / normalizer

    The ratio exp(g) is differentiated and not bounded; the choice of tokens is not differentiated;
    the penalty g^2 (arXiv 2602.02276) also acts on dropped tokens. PRIME-RL's normalizer
    (`loss_scale`) is the number of trainable tokens of the step, at least 1. `loss_weights`
    multiply both parts, one per token or sequence; its revision of 2026-05 has none.

    `clipped_fraction` counts dropped tokens, also those with A = 0, as PRIME-RL's `is_masked`.
    Source: PRIME-RL `trainer/rl/loss.py::default_loss_fn`, the same math at eaf95997f and 559b4477,
    options dppo_mask_low, dppo_mask_high, adv_tau, kl_tau. Differs from it: what stands under no
    mask may be NaN; log-ratios beyond +-80 (float64: 700) count as that.
    """
    check_not_negative("mask_low", mask_low, "use 0.2, or 1 to drop nothing")
    check_not_negative("mask_high", mask_high, "use 0.2, or 1 to drop nothing")
    moved = _probability_gap(logprobs, sampling_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    drop = torch.where(advantage > 0, moved > mask_high, moved < -mask_low)
    return _masked_loss(
        logprobs,
        sampling_logprobs,
        advantage,
        mask,
        drop,
        normalizer,
        adv_tau,
        kl_tau,
        loss_weights,
    )


def prime_rl_ipo_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    threshold: Number = 0.1,
    adv_tau: Number = 1.0,
    kl_tau: Number = 1e-3,
    loss_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """PRIME-RL's loss type `ipo`: `prime_rl_loss` with drop = |d| > threshold, whatever A is.

    No relation to the preference loss IPO. Source: PRIME-RL `trainer/rl/loss.py::ipo_loss_fn` at
    559b4477, option ipo_threshold.
    """
    check_not_negative("threshold", threshold, "use 0.1, or 1 to drop nothing")
    drop = _probability_gap(logprobs, sampling_logprobs, mask).abs() > threshold
    advantage = masked_advantages(advantages, logprobs, mask)
    return _masked_loss(
        logprobs,
        sampling_logprobs,
        advantage,
        mask,
        drop,
        normalizer,
        adv_tau,
        kl_tau,
        loss_weights,
    )


def dppo_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "dapo",
    divergence: Divergence = "tv",
    threshold: Number | None = None,
    threshold_high: Number | None = None,
    ratio_cap: Number | None = 10.0,
) -> PolicyLoss:
    """DPPO (arXiv 2602.04879) with the binary divergence of the sampled token.

        p = exp(logprobs)    q = exp(sampling_logprobs)
        tv    D = |p - q|
        kl    D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8)), in nats
        drop  D > threshold and p moves away: p > q where A > 0, p < q elsewhere
        l     -[not drop] A stop_gradient(min(p / q, ratio_cap)) logprobs

    `threshold` defaults to the paper's .15 for tv and .05 for kl; `threshold_high` is that of
    tokens with A > 0, by default the same. `ratio_cap` None is no bound. The denominator is the
    policy that sampled; the authors' *_recompute modes are this with the recomputed old log-probs.

    `clipped_fraction` counts dropped tokens with A != 0.
    Source: Stable-RL `core_algos.py::compute_policy_loss_with_mask` (c6af1d11), modes
    dppo_binary_tv and dppo_binary_kl, whose default cap is 10; verl's dppo_tv and dppo_kl differ in
    a default cap of 20 and in raising ratios below exp(-20) to it. Differs from both: an empty mask
    gives 0, not NaN; what stands under no mask may be NaN.
    """
    check_choice("divergence", divergence, DIVERGENCES)
    low = THRESHOLDS[divergence] if threshold is None else threshold
    high = low if threshold_high is None else threshold_high
    check_not_negative("threshold", low, f"use {THRESHOLDS[divergence]}")
    check_not_negative("threshold_high", high, f"use {THRESHOLDS[divergence]}")
    check_positive("ratio_cap", ratio_cap, "use 10.0, or None for no bound")
    log_ratio = masked_log_ratio(logprobs, sampling_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    drop = _outside(logprobs, sampling_logprobs, mask, advantage > 0, divergence, (low, high))
    ratio = log_ratio.detach().exp().clamp(max=ratio_cap or torch.inf)
    terms = torch.where(drop, 0.0, -advantage * ratio) * selected(logprobs, mask)
    return policy_loss(
        terms,
        clipped=drop & (advantage != 0),
        ratio=log_ratio.detach().exp(),
        log_ratio=log_ratio,
        mask=mask,
        normalizer=normalizer,
        kind=aggregation,
    )


def _masked_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantage: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    drop: Bool[Tensor, "*B T"],
    normalizer: Number,
    adv_tau: Number,
    kl_tau: Number,
    loss_weights: Float[Tensor, "..."] | None,
) -> PolicyLoss:
    check_not_negative("adv_tau", adv_tau, "use 1.0")
    check_not_negative("kl_tau", kl_tau, "use 1e-3, or 0 for no penalty")
    log_ratio = masked_log_ratio(logprobs, sampling_logprobs, mask)
    ratio = log_ratio.exp()
    kept = torch.where(drop, 0.0, adv_tau * advantage)
    terms = -kept * ratio + kl_tau * log_ratio.square()
    if loss_weights is not None:
        weights = per_token(loss_weights, logprobs, "loss_weights")
        terms = terms * torch.where(mask, weights, 0.0)
    return policy_loss(
        terms,
        clipped=drop,
        ratio=ratio,
        log_ratio=log_ratio,
        mask=mask,
        normalizer=normalizer,
        kind="dapo",
    )


def _probability_gap(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """Policy's less sampler's probability of the token, detached; 0 under no mask."""
    policy, sampler = selected(logprobs.detach(), mask), selected(sampling_logprobs.detach(), mask)
    return policy.exp() - sampler.exp()


def _outside(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    positive: Bool[Tensor, "*B T"],
    divergence: Divergence,
    thresholds: tuple[Number, Number],
) -> Bool[Tensor, "*B T"]:
    """Tokens beyond their threshold that would move on; thresholds for A <= 0 and for A > 0."""
    moved = _probability_gap(logprobs, sampling_logprobs, mask)
    away = torch.where(positive, moved > 0, moved < 0)
    size = moved.abs()
    if divergence == "kl":
        size = _binary_kl(selected(logprobs.detach(), mask), selected(sampling_logprobs, mask))
    return away & torch.where(positive, size > thresholds[1], size > thresholds[0])


def _binary_kl(
    logprobs: Float[Tensor, "*B T"], sampling_logprobs: Float[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """KL of the sampler's coin (this token or not) from the policy's, detached."""
    p, q = logprobs.exp(), sampling_logprobs.detach().exp()
    others = (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return q * (sampling_logprobs.detach() - logprobs) + others
