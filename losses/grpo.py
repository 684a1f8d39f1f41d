"""The GRPO family: policy gradients whose ratio is clipped, truncated or gated.

Axes: B sequences (any number of leading axes, also none), T tokens.

    per-token term -> * sampling_weights -> + kl_beta * KL -> mask -> aggregation

That order is TRL's: the weights of the sampler correction do not apply to the KL penalty. Rows may
hold several packed sequences if nothing is computed per sequence: ratio_level "token", aggregation
other than "grpo" and one advantage per token.

Callers shift, pack, count, sample and compute advantages.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, Reducer, Reduction, policy_loss
from composer_mesh.losses.logprobs import (
    KlEstimator,
    PolicyLoss,
    RatioLevel,
    check_one_per_sequence,
    importance_ratio,
    masked_advantages,
    masked_log_ratio,
    mean_advantages,
    selected,
    token_kl,
    weighted_terms,
)
from composer_mesh.losses.reductions import Number, check_clip, check_not_negative, check_positive


def grpo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    ratio_cap: Number | None = None,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    kl_estimator: KlEstimator = "k3",
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """Clipped surrogate of GRPO (arXiv 2402.03300) with DAPO's aggregation (arXiv 2503.14476).

        r    = exp(logprobs - old_logprobs), or GSPO's ratio with the other ratio levels
        l    = -min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)
        KL   = `token_kl` of kl_estimator, k3 by default;  * r with kl_importance
        loss = sum of (w l + kl_beta KL) over the masked tokens / normalizer

    `advantages` is one number per sequence [*B] or per token [*B T]. Old and reference log-probs,
    advantages and weights get no gradient. Pass `logprobs` as the old ones for a step on policy.

    `normalizer` is what the whole step divides by, `aggregation_normalizer(aggregation, …)`; for
    the default "dapo" the token count. `reduction` "none" returns w l + kl_beta KL per token [*B T]
    and reads no normalizer. `ratio_cap` is TRL's `delta` (INTELLECT-2): it bounds only
    the unclipped branch, which otherwise grows without limit where A < 0; above 1 + clip_high it
    is verl's dual clip `clip_ratio_c`. `kl_beta` in units of the advantage per nat. `kl_importance`
    is TRL's `use_bias_correction_kl` (arXiv 2512.02556); its r takes part in the gradient.
    `sampling_weights` multiply l, one per token or per sequence: see `losses/logprobs.py`.

    GSPO (arXiv 2507.18071; aggregate with "grpo") has two gradients at the same value: ratio_level
    "sequence" differentiates the sequence's ratio, as TRL does, and takes one advantage per
    sequence only; "sequence_token" is GSPO-token, as verl does. They agree where all tokens of a
    sequence have one advantage and one weight.

    `clipped_fraction` counts tokens on which the clip binds, `kl_k3` estimates
    KL(old || policy): the mismatch between sampling and training.

    Source: TRL `GRPOTrainer._compute_loss`, loss types grpo, bnpo, dr_grpo, dapo, and verl
    `compute_policy_loss_gspo`. Differs from them: an empty mask gives metrics of 0, not NaN;
    values outside of the mask may be NaN; log-ratios beyond +-80 (float64: 700) count as that, in
    verl's GSPO above 10. ValueError for a setting out of bounds.
    """
    check_clip(clip_low, clip_high)
    check_positive("ratio_cap", ratio_cap, "use a value above 1 + clip_high, or None")
    if ratio_level == "sequence":
        check_one_per_sequence(advantages, logprobs, "ratio_level 'sequence'")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    advantage = masked_advantages(advantages, logprobs, mask)
    unclipped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -torch.minimum(unclipped * advantage, held * advantage)
    importance = ratio if kl_importance else None
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=clip_binds(ratio, advantage, clip_low, clip_high),
        ratio=ratio,
        log_ratio=log_ratio,
        kl=_reference_kl(logprobs, reference_logprobs, mask, kl_beta, kl_estimator, importance),
        kl_beta=kl_beta,
    )


def cispo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    clip_low: Number = 1.0,
    clip_high: Number = 4.0,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    kl_estimator: KlEstimator = "k3",
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): a truncated ratio weighs log-probs, none is dropped.

        l = -stop_gradient(clip(r, 1 - low, 1 + high)) A logprobs

    The clip bounds are distances from 1 as in `grpo_loss`: a clip_low of 1 is no lower bound, and
    the default clip_high of 4 lets a token weigh 5, what TRL's guide recommends. TRL's epsilon_high
    is the bound itself, for this loss only: 1 + clip_high. verl's `cispo` is clip_low and clip_high
    of 0.2. All else as in `grpo_loss`, also the order of operations.

    `clipped_fraction` counts tokens with a truncated ratio, TRL's only those with A > 0.
    Source: TRL `GRPOTrainer._compute_loss`, loss type cispo.
    """
    check_clip(clip_low, clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * masked_advantages(advantages, logprobs, mask) * selected(logprobs, mask)
    importance = ratio if kl_importance else None
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=weight != ratio.detach(),
        ratio=ratio,
        log_ratio=log_ratio,
        kl=_reference_kl(logprobs, reference_logprobs, mask, kl_beta, kl_estimator, importance),
        kl_beta=kl_beta,
    )


def sapo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "grpo",
    reduction: Reduction = "sum",
    tau_positive: Number = 1.0,
    tau_negative: Number = 1.05,
    ratio_level: RatioLevel = "token",
    kl_beta: Number = 0.0,
    kl_estimator: KlEstimator = "k3",
    reference_logprobs: Float[Tensor, "*B T"] | None = None,
    kl_importance: bool = False,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip, so no gradient is cut off.

        l = -4 / tau sigmoid(tau (r - 1)) A,  tau = tau_positive where A > 0, else tau_negative

    The default aggregation "grpo" (mean of each sequence; normalizer = sequences of the step) is
    the paper's, TRL's and verl's; AReaL takes "dapo". With ratio_level "sequence" A is the mean of
    the sequence's token advantages, as in AReaL's `sapo_loss_fn`. All else as in `grpo_loss`.
    Nothing is clipped: `clipped_fraction` is 0.

    Source: TRL `GRPOTrainer._compute_loss`, loss type sapo. Differs from it: TRL rounds both taus
    to float32 whatever the precision of the log-probs (5e-8 of 1.05).
    """
    check_positive("tau_positive", tau_positive, "use 1.0")
    check_positive("tau_negative", tau_negative, "use 1.05")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, ratio_level)
    spread = mean_advantages if ratio_level == "sequence" else masked_advantages
    advantage = spread(advantages, logprobs, mask)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantage > 0, tau_positive)
    terms = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    importance = ratio if kl_importance else None
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=torch.zeros_like(mask),
        ratio=ratio,
        log_ratio=log_ratio,
        kl=_reference_kl(logprobs, reference_logprobs, mask, kl_beta, kl_estimator, importance),
        kl_beta=kl_beta,
    )


def clip_binds(
    ratio: Float[Tensor, "*B T"], advantage: Float[Tensor, "*B T"], low: Number, high: Number
) -> Bool[Tensor, "*B T"]:
    """Tokens at which the clip [1 - low, 1 + high] is active, so that they have no gradient."""
    fixed = ratio.detach()
    return ((fixed > 1 + high) & (advantage > 0)) | ((fixed < 1 - low) & (advantage < 0))


def _reference_kl(
    logprobs: Float[Tensor, "*B T"],
    reference_logprobs: Float[Tensor, "*B T"] | None,
    mask: Bool[Tensor, "*B T"],
    beta: Number,
    estimator: KlEstimator,
    importance: Float[Tensor, "*B T"] | None,
) -> Float[Tensor, "*B T"] | None:
    """Estimate of KL(policy || reference) per token, in nats; None without a penalty."""
    check_not_negative("kl_beta", beta, "use 0 for no penalty")
    if beta == 0:
        return None
    if reference_logprobs is None:
        raise ValueError(
            f"kl_beta is {beta} but reference_logprobs is None: pass the reference's log-probs,"
            " or kl_beta 0 for no penalty"
        )
    kl = token_kl(logprobs, reference_logprobs, mask, estimator=estimator)
    return kl if importance is None else kl * importance


def reinforce_loss(
    logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """REINFORCE: loss = sum over the masked tokens of -w A logprobs / normalizer.

    `advantages` is one number per sequence [*B] or per token [*B T] and gets no gradient; which
    baseline it contains (RLOO, ReMax, REINFORCE++) is up to the caller. On policy: the ratio
    is 1, as in its metrics. Off policy, `sampling_weights` w, one per token or sequence,
    correct for it: see `losses/logprobs.py`. With w the ratio to the sampler, clamped,
    this is `cispo_loss`. `reduction` "none" returns -w A logprobs per token and reads no
    normalizer.

    Source: verl `core_algos.py::compute_policy_loss_gpg`. Differs from it: an empty mask gives 0.
    AReaL's REINFORCE example does not shift mask and reward with its labels and so credits each
    token for its successor; here all tensors are aligned.
    """
    chosen = selected(logprobs, mask)
    nothing = torch.zeros_like(chosen).detach()
    terms = -masked_advantages(advantages, logprobs, mask) * chosen
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=torch.zeros_like(mask),
        ratio=nothing.exp(),
        log_ratio=nothing,
    )
