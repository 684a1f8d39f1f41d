"""Trust regions in probabilities: DPPO, and PRIME-RL's losses.

Axes: B sequences or packed rows (any number of leading axes, also none), T tokens.

DPPO drops a token from the policy gradient when it has moved too far away from the centre of the
trust region in the direction that the advantage pushes. What is far is a divergence: of the sampled
token against all others ("binary"), or the ratio.

PRIME-RL's have a squared log-ratio, and a teacher as advantage. They are against the policy that
sampled and sum over tokens; the normalizer (`loss_scale`) is the number of trainable tokens of the
step, at least 1.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.logprobs import (
    Aggregation,
    PolicyLoss,
    Reducer,
    masked_advantages,
    masked_log_ratio,
    policy_loss,
    probability_gap,
    selected,
    token_kl,
    weighted_terms,
)
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    check_choice,
    check_not_negative,
    check_positive,
)

Divergence = Literal["tv", "kl", "ratio"]
THRESHOLDS = {"tv": 0.15, "kl": 0.05, "ratio": 0.2}


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
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """DPPO (arXiv 2602.04879): tokens outside a trust region have no policy gradient.

        p = exp(logprobs)    q = exp(sampling_logprobs)
        c = exp(old_logprobs) where these are given, else q: the centre of the trust region
        tv       D = |p - c|
        kl       D = c log(c / p) + (1 - c) log((1 - c + 1e-8) / (1 - p + 1e-8)), in nats
        ratio    D = |p / c - 1|
        drop     D > threshold and p moves away: p > c where A > 0, p < c elsewhere
        l        -[not drop] A stop_gradient(min(p / q, ratio_cap)) logprobs

    `threshold` defaults to the paper's .15 for tv and .05 for kl, and to .2 for the ratio;
    `threshold_high` is that of tokens with A > 0, by default the same. `ratio_cap` None is no
    bound. `old_logprobs`, the trainer's own recomputed log-probs, move the trust region only: the
    ratio stays against the policy that sampled. `sampling_weights` multiply l, one per token or
    sequence. `reduction` "none" returns l per token and reads no normalizer.

    `clipped_fraction` counts dropped tokens with A != 0.
    Source: Stable-RL `core_algos.py::compute_policy_loss_with_mask` (c6af1d11), whose default cap
    is 10: modes dppo_binary_tv, dppo_binary_kl, ppo (divergence
    "ratio", the mask of PPO), the *_recompute forms (with old_logprobs) and pg_no_mask (threshold
    inf). There sampling_weights (rollout_is_weights) are an argument that is not read. verl's
    dppo_tv and dppo_kl differ in a default cap of 20 and in raising ratios below exp(-20) to it.
    Differs from both: an empty mask gives 0, not NaN; values outside of the mask may be NaN.
    """
    check_choice("divergence", divergence, get_args(Divergence))
    low = THRESHOLDS[divergence] if threshold is None else threshold
    high = low if threshold_high is None else threshold_high
    check_not_negative("threshold", low, f"use {THRESHOLDS[divergence]}")
    check_not_negative("threshold_high", high, f"use {THRESHOLDS[divergence]}")
    check_positive("ratio_cap", ratio_cap, "use 10.0, or None for no bound")
    log_ratio = masked_log_ratio(logprobs, sampling_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    centre = sampling_logprobs if old_logprobs is None else old_logprobs
    size = _distances(logprobs, centre, mask, divergence)
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


def _distances(
    logprobs: Float[Tensor, "*B T"],
    centre: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    divergence: Divergence,
) -> Float[Tensor, "*B T"]:
    """Distance of each masked token from the centre of the trust region, detached."""
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


def prime_rl_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
    mask_low: Number = 0.2,
    mask_high: Number = 0.2,
    adv_tau: Number = 1.0,
    kl_tau: Number = 1e-3,
    teacher_tau: Number = 0.0,
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """PRIME-RL's default loss: DPPO with binary TV (arXiv 2602.04879) and Kimi-K2.5's penalty.

        d    = exp(logprobs) - exp(sampling_logprobs)
        drop = d > mask_high where A > 0, d < -mask_low elsewhere
        g    = logprobs - sampling_logprobs
        t    = stop_gradient(reference_logprobs - logprobs)
        l    = -[not drop] (adv_tau A + teacher_tau t) exp(g) + kl_tau g^2
        loss = sum of l over the masked tokens / normalizer

    The ratio exp(g) is differentiated and not bounded; the choice of tokens is not differentiated;
    the penalty g^2 (arXiv 2602.02276) also acts on dropped tokens. `teacher_tau` adds the reverse
    KL to the reference as an advantage of each token: on-policy distillation from it.
    `sampling_weights` (PRIME-RL's loss_weights) multiply l with its penalty, one per token or
    sequence. `reduction` "none" returns l per token and reads no normalizer.

    `clipped_fraction` counts dropped tokens, also those with A = 0, as PRIME-RL's `is_masked`;
    `kl_reference` is the mean of -t, None without a teacher_tau.
    Source: PRIME-RL `trainer/rl/loss.py::default_loss_fn`, the same math at eaf95997f and 559b4477,
    options dppo_mask_low, dppo_mask_high, adv_tau, kl_tau; teacher_tau as at ff4b125e. Its
    `opd_loss_fn` (eaf95997f) is adv_tau 0 and teacher_tau 1. Differs from it: values outside of
    the mask may be NaN; log-ratios beyond +-80 (float64: 700) count as that.
    """
    check_not_negative("mask_low", mask_low, "use 0.2, or 1 to drop nothing")
    check_not_negative("mask_high", mask_high, "use 0.2, or 1 to drop nothing")
    moved = probability_gap(logprobs, sampling_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    drop = torch.where(advantage > 0, moved > mask_high, moved < -mask_low)
    gap = _reference_gap(logprobs, reference_logprobs, mask, teacher_tau)
    _check_taus(adv_tau, kl_tau)
    signal = adv_tau * advantage if gap is None else adv_tau * advantage - teacher_tau * gap
    return _masked_loss(
        masked_log_ratio(logprobs, sampling_logprobs, mask),
        signal,
        drop,
        kl_tau,
        sampling_weights,
        Reducer(mask, "dapo", normalizer, reduction),
        gap,
    )


def prime_rl_ipo_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
    threshold: Number = 0.1,
    adv_tau: Number = 1.0,
    kl_tau: Number = 1e-3,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """PRIME-RL's loss type `ipo`: `prime_rl_loss` with drop = |d| > threshold, whatever A is.

    No relation to the preference loss IPO. Source: PRIME-RL `trainer/rl/loss.py::ipo_loss_fn` at
    559b4477, option ipo_threshold.
    """
    check_not_negative("threshold", threshold, "use 0.1, or 1 to drop nothing")
    _check_taus(adv_tau, kl_tau)
    return _masked_loss(
        masked_log_ratio(logprobs, sampling_logprobs, mask),
        adv_tau * masked_advantages(advantages, logprobs, mask),
        probability_gap(logprobs, sampling_logprobs, mask).abs() > threshold,
        kl_tau,
        sampling_weights,
        Reducer(mask, "dapo", normalizer, reduction),
    )


def _masked_loss(
    log_ratio: Float[Tensor, "*B T"],
    signal: Float[Tensor, "*B T"],
    drop: Bool[Tensor, "*B T"],
    kl_tau: Number,
    sampling_weights: Float[Tensor, "..."] | None,
    reduce: Reducer,
    reference_gap: Float[Tensor, "*B T"] | None = None,
) -> PolicyLoss:
    ratio = log_ratio.exp()
    terms = -torch.where(drop, 0.0, signal) * ratio + kl_tau * log_ratio.square()
    return policy_loss(
        reduce,
        weighted_terms(terms, sampling_weights, reduce.mask),
        clipped=drop,
        ratio=ratio,
        log_ratio=log_ratio,
        kl=reference_gap,
    )


def _reference_gap(
    logprobs: Float[Tensor, "*B T"],
    reference_logprobs: Float[Tensor, "*B T"] | None,
    mask: Bool[Tensor, "*B T"],
    teacher_tau: Number,
) -> Float[Tensor, "*B T"] | None:
    """Policy's less the reference's log-prob of each token, detached; None without a teacher."""
    check_not_negative("teacher_tau", teacher_tau, "use 1.0, or 0 for no teacher")
    if teacher_tau == 0:
        return None
    if reference_logprobs is None:
        raise ValueError(
            f"teacher_tau is {teacher_tau} but reference_logprobs is None: pass the teacher's"
            " log-probs of the sampled tokens, or leave the teacher's weight out"
        )
    return token_kl(logprobs.detach(), reference_logprobs, mask, estimator="k1")


def _check_taus(adv_tau: Number, kl_tau: Number) -> None:
    check_not_negative("adv_tau", adv_tau, "use 1.0")
    check_not_negative("kl_tau", kl_tau, "use 1e-3, or 0 for no penalty")
