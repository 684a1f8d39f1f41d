"""The GRPO family: policy gradients whose ratio is clipped, truncated or gated.

GMPO and VESPO, the losses of whole sequences, have one sequence per row and one advantage for each.

Axes: B sequences (any number of leading axes, also none), T tokens.

    per-token term -> * sampling_weights -> + kl_beta * KL -> mask -> aggregation

That order is TRL's: the weights of the sampler correction do not apply to the KL penalty. Rows may
hold several packed sequences if nothing is computed per sequence: ratio_level "token", aggregation
other than "grpo" and one advantage per token.

Callers shift, pack, count, sample and compute advantages.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.logprobs import (
    Aggregation,
    KlEstimator,
    PolicyLoss,
    RatioLevel,
    Reducer,
    check_one_per_sequence,
    importance_ratio,
    masked_advantages,
    masked_log_ratio,
    masked_mean,
    mean_advantages,
    per_token,
    policy_loss,
    selected,
    token_kl,
    weighted_terms,
)
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    check_clip,
    check_not_negative,
    check_positive,
)


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


def gmpo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "grpo",
    reduction: Reduction = "sum",
    log_clip_low: Number = 0.4,
    log_clip_high: Number = 0.4,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """GMPO (arXiv 2507.20673): the geometric mean of token ratios, clipped token by token.

        g    = logprobs - old_logprobs, clamped to at most log_clip_high where A > 0 and at least
               -log_clip_low where A < 0
        l    = -A exp(mean of g over the sequence's masked tokens), on each of them
        loss = sum over sequences of l / normalizer, with aggregation "grpo"

    The bounds are of the log-ratio, not distances of the ratio from 1. `sampling_weights` multiply
    l by their geometric mean over the sequence. `reduction` "none" returns l per token and reads no
    normalizer. `clipped_fraction` counts tokens on which the clip binds.

    Source: verl `core_algos.py::compute_policy_loss_geo_mean` (b178a3cd), whose recipe sets both
    bounds to 0.4 and which divides by all sequences. Differs: one advantage per token is refused,
    where verl takes the mean; means are over n tokens, there over n + 1e-8; a weight of 0 or less
    counts as 1e-10, there 1e-10 is added to all.
    """
    check_positive("log_clip_low", log_clip_low, "use 0.4, or inf for no lower clip")
    check_positive("log_clip_high", log_clip_high, "use 0.4, or inf for no upper clip")
    check_one_per_sequence(advantages, logprobs, "GMPO")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    held = torch.where(
        advantage > 0, log_ratio.clamp(max=log_clip_high), log_ratio.clamp(min=-log_clip_low)
    )
    ratio = masked_mean(held, mask).exp().expand_as(log_ratio)
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        -advantage * ratio * _geometric_mean(sampling_weights, log_ratio, mask),
        clipped=(held != log_ratio) & (advantage != 0),
        ratio=ratio,
        log_ratio=log_ratio,
    )


def vespo_loss(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    k_positive: Number = 2.0,
    lambda_positive: Number = 3.0,
    k_negative: Number = 3.0,
    lambda_negative: Number = 2.0,
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """VESPO (arXiv 2602.10693): a smooth weight of the sequence's whole importance ratio.

        log w = sum over the masked tokens of logprobs - old_logprobs + log sampling_weights
        phi   = stop_gradient(w^k exp(lambda (1 - w))), 1 at w = 1
        l     = -phi A logprobs;  k and lambda are the positive ones where A >= 0

    w is the product over tokens, no geometric mean, within [1e-8, exp(20)]. `sampling_weights` of
    single tokens enter it; a weight of a whole sequence would count once for each of its tokens.
    `reduction` "none" returns l per token and reads no normalizer. Nothing is clipped:
    `clipped_fraction` is 0.

    Source: TRL `GRPOTrainer.get_gamma_weights` (f2cd5771), loss type vespo, whose defaults these
    are. Differs: one advantage per token is refused; weights under no mask are not read.
    """
    powers = {"k_positive": k_positive, "k_negative": k_negative}
    decays = {"lambda_positive": lambda_positive, "lambda_negative": lambda_negative}
    for name, value in (powers | decays).items():
        check_not_negative(name, value, "use 2.0 or 3.0")
    check_one_per_sequence(advantages, logprobs, "VESPO")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantage = masked_advantages(advantages, logprobs, mask)
    log_w = _sequence_log_weight(log_ratio.detach(), sampling_weights, mask)
    rising = advantage >= 0
    k = torch.where(rising, k_positive, k_negative).to(log_w.dtype)
    decay = torch.where(rising, lambda_positive, lambda_negative).to(log_w.dtype).clamp(min=1e-4)
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        -phi * advantage * selected(logprobs, mask),
        clipped=torch.zeros_like(mask),
        ratio=log_ratio.exp(),
        log_ratio=log_ratio,
    )


def _sequence_log_weight(
    log_ratio: Float[Tensor, "*B T"],
    weights: Float[Tensor, "..."] | None,
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B 1"]:
    """Logarithm of a sequence's ratio times the weights of its tokens, clamped as in TRL."""
    lowest = math.log(1e-8)
    total = log_ratio.clamp(-20, 20).sum(-1, keepdim=True)
    if weights is not None:
        given = torch.where(mask, per_token(weights, log_ratio, "sampling_weights"), 1.0)
        total = total + given.log().clamp(lowest, 20).sum(-1, keepdim=True)
    return total.clamp(lowest, 20)


def _geometric_mean(
    weights: Float[Tensor, "..."] | None,
    log_ratio: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """Geometric mean of the masked tokens' weights; 1 without weights."""
    if weights is None:
        return torch.ones_like(log_ratio).detach()
    given = torch.where(mask, per_token(weights, log_ratio, "sampling_weights"), 1.0)
    return masked_mean(given.clamp(min=1e-10).log(), mask).exp().expand_as(log_ratio)
