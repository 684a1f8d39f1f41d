"""The GRPO family: policy gradients whose ratio is clipped, truncated or gated.

Axes: B sequences (any number of leading axes, also none), T tokens.

    per-token term -> * sampling_weights -> + kl_beta * KL -> mask -> aggregation

That order is TRL's: the weights of the sampler correction do not touch the KL penalty. Rows may
hold several packed sequences where nothing is asked of a whole sequence: ratio_level "token",
aggregation other than "grpo" and one advantage per token.

Nothing here shifts, packs, counts, samples or computes advantages.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, aggregate, policy_loss
from composer_mesh.losses.checks import check_clip, check_not_negative, check_positive
from composer_mesh.losses.logprobs import (
    PolicyLoss,
    RatioLevel,
    bounded,
    importance_ratio,
    masked_advantages,
    masked_log_ratio,
    per_token,
    selected,
)
from composer_mesh.losses.reductions import Number


def grpo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "dapo",
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    ratio_cap: Number | None = None,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """Clipped surrogate of GRPO (arXiv 2402.03300) with DAPO's aggregation (arXiv 2503.14476).

        r    = exp(logprobs - old_logprobs), or GSPO's ratio with ratio_level "sequence"
        l    = -min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)
        KL   = k - 1 - log k, k = exp(reference_logprobs - logprobs);  * r with kl_importance
        loss = sum of (w l + kl_beta KL) over the masked tokens / normalizer

    `advantages` is one number per sequence [*B] or per token [*B T]. Old and reference log-probs,
    advantages and weights get no gradient. Pass `logprobs` as the old ones for a step on policy.

    `normalizer` is what the whole step divides by, `aggregation_normalizer(aggregation, …)`; for
    the default "dapo" the token count. `ratio_cap` is TRL's `delta` (INTELLECT-2): it bounds only
    the unclipped branch, which otherwise grows without limit where A < 0; above 1 + clip_high it
    is verl's dual clip `clip_ratio_c`. ratio_level "sequence" is GSPO (arXiv 2507.18071; its paper
    aggregates with "grpo"). `kl_beta` in units of the advantage per nat. `kl_importance` is TRL's
    `use_bias_correction_kl` (arXiv 2512.02556); its r takes part in the gradient.
    `sampling_weights` multiply l, one per token or per sequence: see `losses/correction.py`.

    `clipped_fraction` counts tokens on which the clip binds, `kl_k3` estimates
    KL(old || policy): the mismatch between sampling and training.

    Source: TRL `GRPOTrainer._compute_loss`, loss types grpo, bnpo, dr_grpo, dapo. Differs from it:
    an empty mask gives figures of 0, not NaN; what stands under no mask may be NaN; log-ratios
    beyond +-80 (float64: 700) count as that. ValueError for a setting out of bounds.
    """
    check_clip(clip_low, clip_high)
    check_positive("ratio_cap", ratio_cap, "use a value above 1 + clip_high, or None")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    advantage = masked_advantages(advantages, logprobs, mask)
    unclipped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    found = policy_loss(
        _weighted(-torch.minimum(unclipped * advantage, held * advantage), sampling_weights, mask),
        clipped=clip_binds(ratio, advantage, clip_low, clip_high),
        ratio=ratio,
        log_ratio=log_ratio,
        mask=mask,
        normalizer=normalizer,
        kind=aggregation,
    )
    kl = _reference_kl(
        logprobs, reference_logprobs, mask, kl_beta, ratio if kl_importance else None
    )
    return _penalized(found, kl, kl_beta, mask, aggregation, normalizer)


def cispo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "dapo",
    clip_high: Number = 5.0,
    clip_low: Number | None = None,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): a truncated ratio weighs log-probs, none is dropped.

        l = -stop_gradient(min(r, clip_high)) A logprobs

    `clip_high` is the bound of the ratio itself and not its distance from 1, as TRL's epsilon_high
    is for this loss (there the default of 0.2 is inherited; 5.0 is what its guide uses). `clip_low`
    bounds the ratio from below in the same way, None for no bound: verl's `cispo` is clip_low
    1 - low with clip_high 1 + high. All else as in `grpo_loss`, also the order of operations.

    `clipped_fraction` counts tokens with a truncated ratio, TRL's only those with A > 0.
    Source: TRL `GRPOTrainer._compute_loss`, loss type cispo.
    """
    check_positive("clip_high", clip_high, "use 5.0, the largest weight of a token")
    check_not_negative("clip_low", clip_low, "use a floor of the ratio, or None for none")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    weight = ratio.detach().clamp(min=clip_low, max=clip_high)
    terms = -weight * masked_advantages(advantages, logprobs, mask) * selected(logprobs, mask)
    found = policy_loss(
        _weighted(terms, sampling_weights, mask),
        clipped=weight != ratio.detach(),
        ratio=ratio,
        log_ratio=log_ratio,
        mask=mask,
        normalizer=normalizer,
        kind=aggregation,
    )
    kl = _reference_kl(
        logprobs, reference_logprobs, mask, kl_beta, ratio if kl_importance else None
    )
    return _penalized(found, kl, kl_beta, mask, aggregation, normalizer)


def sapo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "grpo",
    tau_positive: Number = 1.0,
    tau_negative: Number = 1.05,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip, so no gradient is cut off.

        l = -4 / tau sigmoid(tau (r - 1)) A,  tau = tau_positive where A > 0, else tau_negative

    The default aggregation "grpo" (mean of each sequence; normalizer = sequences of the step) is
    the paper's, TRL's and verl's; AReaL takes "dapo". All else as in `grpo_loss`. Nothing is
    clipped: `clipped_fraction` is 0.

    Source: TRL `GRPOTrainer._compute_loss`, loss type sapo. Differs from it: TRL rounds both taus
    to float32 whatever the precision of the log-probs (5e-8 of 1.05).
    """
    check_positive("tau_positive", tau_positive, "use 1.0")
    check_positive("tau_negative", tau_negative, "use 1.05")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    advantage = masked_advantages(advantages, logprobs, mask)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantage > 0, tau_positive)
    terms = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    found = policy_loss(
        _weighted(terms, sampling_weights, mask),
        clipped=torch.zeros_like(mask),
        ratio=ratio,
        log_ratio=log_ratio,
        mask=mask,
        normalizer=normalizer,
        kind=aggregation,
    )
    kl = _reference_kl(
        logprobs, reference_logprobs, mask, kl_beta, ratio if kl_importance else None
    )
    return _penalized(found, kl, kl_beta, mask, aggregation, normalizer)


def clip_binds(
    ratio: Float[Tensor, "*B T"], advantage: Float[Tensor, "*B T"], low: Number, high: Number
) -> Bool[Tensor, "*B T"]:
    """Where the clip [1 - low, 1 + high] decides and the token has no gradient."""
    fixed = ratio.detach()
    return ((fixed > 1 + high) & (advantage > 0)) | ((fixed < 1 - low) & (advantage < 0))


def _weighted(
    terms: Float[Tensor, "*B T"],
    weights: Float[Tensor, "..."] | None,
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    if weights is None:
        return terms
    return terms * torch.where(mask, per_token(weights, terms, "sampling_weights"), 0.0)


def _reference_kl(
    logprobs: Float[Tensor, "*B T"],
    reference_logprobs: Float[Tensor, "*B T"] | None,
    mask: Bool[Tensor, "*B T"],
    beta: Number,
    importance: Float[Tensor, "*B T"] | None,
) -> Float[Tensor, "*B T"] | None:
    """Terms of the k3 estimate of KL(policy || reference), in nats; None without a penalty."""
    check_not_negative("kl_beta", beta, "use 0 for no penalty")
    if beta == 0:
        return None
    if reference_logprobs is None:
        raise ValueError(
            f"kl_beta is {beta} but reference_logprobs is None: pass the reference's log-probs,"
            " or kl_beta 0 for no penalty"
        )
    gap = bounded(selected(reference_logprobs.detach(), mask) - selected(logprobs, mask))
    kl = torch.expm1(gap) - gap
    return kl if importance is None else kl * importance


def _penalized(
    found: PolicyLoss,
    kl: Float[Tensor, "*B T"] | None,
    beta: Number,
    mask: Bool[Tensor, "*B T"],
    kind: Aggregation,
    normalizer: Number,
) -> PolicyLoss:
    if kl is None:
        return found
    penalty = aggregate(kl, mask, kind, normalizer)
    return replace(found, loss=found.loss + beta * penalty, kl_reference=penalty.detach())
