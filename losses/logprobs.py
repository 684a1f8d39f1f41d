"""Parts of every policy loss: log-probs of sampled tokens, ratios, advantages, and aggregation.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary. Position t of
every tensor refers to the same token: callers shift, pack and count.

The weights that correct for the mismatch between the sampler and the policy it was loaded from are
constants that a loss multiplies its terms by. Products of weights are weights.

Aggregation reduces the terms of tokens to the loss of a step, with an explicit normalizer. It takes
one sequence per row: "grpo" is a mean over each. Callers count tokens and sequences, and split the
step into microbatches and ranks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_choice,
    check_not_negative,
    check_positive,
    check_temperature,
    masked_sum,
    normalized_sum,
)

RatioLevel = Literal["token", "sequence", "sequence_token"]

# exp(80) is finite in float32 and exp(89) is not; an infinite ratio has a NaN gradient even where
# the clip discards it. In float64 exp(709) is the last finite one.
LOG_RATIO_LIMIT = 80.0
_LOG_RATIO_LIMIT_FLOAT64 = 700.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and its metrics, which are reduced as the loss is.

    With reduction "none" all of them are per token [*B T], `ratio_mean` the ratio itself. With the
    token count of the step as normalizer the metrics of microbatches add up to the means of the
    batch. All but `loss` are detached. `kl_k3` is r - 1 - log r of the loss's own ratio r = policy
    / denominator and so estimates KL(denominator || policy), in nats.

    `kl_reference` is the penalty's KL(policy || reference), None without a penalty;
    `filtered_fraction` is the fraction of tokens that a rejection dropped or clamped, None for
    losses without rejection.
    """

    loss: Float[Tensor, "..."]
    clipped_fraction: Float[Tensor, "..."]
    ratio_mean: Float[Tensor, "..."]
    kl_k3: Float[Tensor, "..."]
    kl_reference: Float[Tensor, "..."] | None = None
    filtered_fraction: Float[Tensor, "..."] | None = None


def token_logprobs(
    logits: Float[Tensor, "*B T V"], targets: Int[Tensor, "*B T"], temperature: Number = 1.0
) -> Float[Tensor, "*B T"]:
    """Log-probability of each target under `softmax(logits / temperature)`, in nats.

    Aligned: `logits[..., t, :]` is the prediction of `targets[..., t]`; the caller has shifted.
    A target under no mask must still be an id below V.
    """
    check_temperature(temperature)
    scores = at_least_float32(logits) / temperature
    chosen = scores.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return chosen - scores.logsumexp(-1)


def selected(values: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Values under the mask in float32 at least, 0 elsewhere, so that no NaN remains."""
    return torch.where(mask, at_least_float32(values), 0.0)


def masked_log_ratio(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """Return logprobs - old_logprobs under the mask, 0 elsewhere; the old ones get no gradient.

    The difference is clamped to +-80 (+-700 in float64), so that its exponential stays finite.
    """
    # Selected before the subtraction: a NaN outside of the mask would reach the gradient through
    # exp.
    return bounded(selected(logprobs, mask) - selected(old_logprobs.detach(), mask))


def probability_gap(
    logprobs: Float[Tensor, "*B T"],
    other_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """Difference of two policies' probabilities of each token, detached; 0 outside of the mask."""
    one, other = selected(logprobs.detach(), mask), selected(other_logprobs.detach(), mask)
    return one.exp() - other.exp()


def bounded(log_ratio: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Clamp log-ratios so that their exponential is finite in their own precision."""
    double = log_ratio.dtype == torch.float64
    limit = _LOG_RATIO_LIMIT_FLOAT64 if double else LOG_RATIO_LIMIT
    return log_ratio.clamp(-limit, limit)


def masked_mean(values: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B 1"]:
    """Mean over the masked tokens of each sequence; 0 for a sequence without any."""
    total = torch.where(mask, values, 0.0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def importance_ratio(
    log_ratio: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"], level: RatioLevel
) -> Float[Tensor, "*B T"]:
    """exp of each token's log-ratio, or of their mean over the sequence on each of its tokens.

    The sequence's ratio s is GSPO's (arXiv 2507.18071), a geometric mean over the masked tokens.
    "sequence" differentiates s itself, through all tokens (TRL); "sequence_token" is GSPO-token,
    the same value with a gradient through each token's own log-prob: sg(s) exp(lp - sg(lp))
    (verl, TRL's experimental gspo_token).
    """
    check_choice("ratio_level", level, get_args(RatioLevel))
    if level == "token":
        return log_ratio.exp()
    mean = masked_mean(log_ratio, mask).expand_as(log_ratio)
    if level == "sequence_token":
        mean = mean.detach() + log_ratio - log_ratio.detach()
    return mean.exp()


def per_token(
    values: Float[Tensor, "..."], logprobs: Float[Tensor, "*B T"], name: str = "advantages"
) -> Float[Tensor, "..."]:
    """One number per sequence [*B] or [*B 1] made to broadcast over its tokens; detached.

    One per token [*B T] stays what it is.
    """
    values = at_least_float32(values.detach())
    if values.shape in (logprobs.shape, (*logprobs.shape[:-1], 1)):
        return values
    if values.shape == logprobs.shape[:-1]:
        return values.unsqueeze(-1)
    raise ValueError(
        f"{name} have shape {tuple(values.shape)} but log-probs {tuple(logprobs.shape)}:"
        " pass one number per sequence or one per token"
    )


def masked_advantages(
    advantages: Float[Tensor, "..."], logprobs: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """Advantages of the tokens under the mask, 0 elsewhere; detached."""
    return torch.where(mask, per_token(advantages, logprobs), 0.0)


def mean_advantages(
    advantages: Float[Tensor, "..."], logprobs: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """Mean advantage of each sequence's masked tokens, on each of them; detached."""
    advantage = masked_advantages(advantages, logprobs, mask)
    return torch.where(mask, masked_mean(advantage, mask), 0.0)


def check_one_per_sequence(
    advantages: Float[Tensor, "..."], logprobs: Float[Tensor, "*B T"], what: str
) -> None:
    """Raise for one advantage per token if `what` is defined for one per sequence only."""
    if advantages.shape == logprobs.shape and logprobs.shape[-1] != 1:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}, one per token, but {what} is defined"
            " for one per sequence: pass shape [*B]"
        )


def weighted_terms(
    terms: Float[Tensor, "*B T"],
    weights: Float[Tensor, "..."] | None,
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """The terms times weights of 0 or more, one per token or sequence; None weighs 1."""
    if weights is None:
        return terms
    return terms * torch.where(mask, per_token(weights, terms, "sampling_weights"), 0.0)


KlEstimator = Literal["k1", "k2", "k3", "abs", "low_var_kl"]


def token_kl(
    logprobs: Float[Tensor, "*B T"],
    reference_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    estimator: KlEstimator = "k3",
    k2_gradient: bool = False,
) -> Float[Tensor, "*B T"]:
    """Estimate of KL(policy || reference) at each masked token, 0 elsewhere.

        d           logprobs - reference_logprobs
        k1          d
        k2          d^2 / 2
        k3          exp(-d) - 1 + d
        abs         |d|
        low_var_kl  k3 with d clamped to +-20 and the result within 10, as verl does

    k1 and k3 are unbiased in value, k2 in gradient: the expected gradient of k1 is 0, that of k3
    is the other direction's, KL(reference || policy). `k2_gradient` keeps the value and takes the
    gradient of k2, verl's estimators with a "+". The reference gets no gradient; differences beyond
    +-80 (float64: 700) count as that.

    Source: verl `core_algos.py::kl_penalty` (kl, mse, low_var_kl are its names for k1, k2 and k3,
    the last always with the bounds of low_var_kl); TRL's GRPO penalty is k3.
    """
    check_choice("estimator", estimator, get_args(KlEstimator))
    gap = masked_log_ratio(logprobs, reference_logprobs, mask)
    value = estimate_kl(gap, estimator)
    if not k2_gradient:
        return value
    half_square = estimate_kl(gap, "k2")
    return half_square - half_square.detach() + value.detach()


def estimate_kl(gap: Float[Tensor, "*B T"], estimator: KlEstimator) -> Float[Tensor, "*B T"]:
    """Return the estimate from log-ratios of policy over reference."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator == "abs":
        return gap.abs()
    if estimator == "low_var_kl":
        held = gap.clamp(-20, 20)
        return (torch.expm1(-held) + held).clamp(max=10)
    return torch.expm1(-gap) + gap


CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def sampling_weights(
    old_logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    mode: CorrectionMode = "sequence_mask",
    maximum: Number | None = 3.0,
    minimum: Number | None = None,
) -> Float[Tensor, "*B T"]:
    """Importance weights of the trainer's old policy against what the generator reported.

        w = exp(old_logprobs - sampling_logprobs)             token_*
        w = exp(the sum of those over the masked tokens)      sequence_*, the same on each token
        *_truncate  w clamped to [minimum, maximum]
        *_mask      w where it is within them (bounds included), else 0

    None is no bound. Detached. A token outside of the mask counts as a ratio of 1 for the sum, and
    its weight is meaningless. The sequence's ratio is a product and no mean, so that with T tokens
    it leaves [1/3, 3] at a mean mismatch of log(3) / T nats.

    Source: TRL `GRPOTrainer._generate_and_score_completions`
    (vllm_importance_sampling_mode, _clip_max, _clip_min), whose defaults these are. There the old
    log-probs are recomputed by the trainer whenever the correction is on. Differs from TRL: values
    outside of the mask may be NaN; log-ratios beyond +-80 (float64: 700) count as that.
    """
    check_choice("mode", mode, get_args(CorrectionMode))
    _check_bounds(minimum, maximum)
    level, action = mode.split("_")
    log_ratio = masked_log_ratio(old_logprobs.detach(), sampling_logprobs, mask)
    if level == "sequence":
        log_ratio = bounded(log_ratio.sum(-1, keepdim=True)).expand_as(log_ratio)
    weights = log_ratio.exp()
    held = weights
    if minimum is not None or maximum is not None:
        held = weights.clamp(min=minimum, max=maximum)
    return held if action == "truncate" else torch.where(held == weights, weights, 0.0)


def off_policy_weights(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    threshold: Number,
) -> Float[Tensor, "*B T"]:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556) as weights of 1 and 0.

    0 where A < 0 and the sequence's mean of sampling_logprobs - logprobs exceeds the threshold (in
    nats per token), else 1; detached. Multiply with `sampling_weights` where both are wanted.

    Source: TRL `GRPOTrainer.get_off_policy_mask` (off_policy_mask_threshold), which takes the old
    log-probs where the generator reports none.
    """
    check_not_negative("threshold", threshold, "use nats per token, such as 0.1")
    gap = selected(sampling_logprobs, mask) - selected(logprobs, mask)
    off_policy = masked_mean(gap.detach(), mask) > threshold
    drop = off_policy & (per_token(advantages, logprobs) < 0)
    return torch.where(drop, 0.0, torch.ones_like(gap)).detach()


def _check_bounds(minimum: Number | None, maximum: Number | None) -> None:
    check_positive("maximum", maximum, "use 3.0, or None for no upper bound")
    check_not_negative("minimum", minimum, "use 0.3, or None for no lower bound")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise ValueError(
            f"minimum is {minimum} but must be <= maximum, {maximum}: raise maximum or lower it"
        )


Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


@dataclass(frozen=True)
class Reducer:
    """Reduces a loss's values per token, with the caller's settings.

    "sum" aggregates them to one scalar; "none" returns them [*B T] undivided, 0 outside of the
    mask, so that `aggregate` of them is what "sum" returns.
    """

    mask: Bool[Tensor, "*B T"]
    aggregation: Aggregation
    normalizer: Number | None
    reduction: Reduction

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("reduction", self.reduction, get_args(Reduction))
        if self.reduction == "sum" and self.normalizer is None:
            raise ValueError(
                "normalizer is None but reduction 'sum' divides by it: pass the count of the whole"
                " step, `aggregation_normalizer(aggregation, ...)`, or reduction='none'"
            )

    def __call__(self, values: Float[Tensor, "*B T"]) -> Float[Tensor, "..."]:
        """Return the aggregated values, or the values under the mask."""
        if self.reduction == "none" or self.normalizer is None:
            return torch.where(self.mask, values, 0.0)
        return aggregate(values, self.mask, self.aggregation, self.normalizer)


def aggregate(
    values: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    kind: Aggregation,
    normalizer: Number,
) -> Float[Tensor, ""]:
    """Terms of tokens to one scalar, in the units of the terms; an empty mask gives 0.

        grpo        sum over sequences of (the mean over the tokens of each) / normalizer
        all others  sum over all tokens / normalizer

    `aggregation_normalizer` gives each kind's normalizer for a whole step. A sequence without a
    token under the mask adds 0 to any of them. Aggregation types are TRL's `loss_type`
    (`GRPOTrainer._compute_loss`); verl's `agg_loss` modes are the same sums:

        token-mean               dapo, normalizer = tokens of the step
        seq-mean-token-mean      grpo, normalizer = sequences with a token
        seq-mean-token-sum       luspo, normalizer = sequences with a token
        seq-mean-token-sum-norm  dr_grpo, normalizer = sequences * horizon (older: horizon)

    Raises ValueError for an unknown kind or a normalizer that is no count. Differs from verl where
    the mask is empty, which is NaN there, and in "grpo": verl divides the sum of a sequence by its
    n + 1e-8 tokens, here by n.
    """
    check_choice("aggregation", kind, get_args(Aggregation))
    if kind == "grpo":
        return normalized_sum(masked_mean(values, mask), normalizer)
    return masked_sum(values, mask, normalizer)


def aggregation_normalizer(
    kind: Aggregation,
    *,
    sequences: int,
    tokens: int,
    max_completion_length: int | None = None,
) -> int:
    """What one optimizer step divides by, from its counts over all microbatches and ranks.

        grpo        sequences                          DeepSeekMath, arXiv 2402.03300
        bnpo, dapo  tokens                             DAPO, arXiv 2503.14476
        dr_grpo     sequences * max_completion_length  Dr. GRPO, arXiv 2503.20783
        luspo       sequences                          LUSPO, arXiv 2602.05261

    `tokens` counts those under the mask, `sequences` all rows, also those without a token. The
    losses of all microbatches and ranks then sum (not average) to the loss of the step.

    LUSPO is GSPO (ratio_level "sequence") with each sequence weighted by its length.

    TRL means the same for grpo, dr_grpo, luspo and dapo, in other words: its grpo, bnpo, luspo and
    dr_grpo take the microbatch's own counts, divide by gradient_accumulation_steps and average over
    ranks, and its dapo divides by num_items_in_batch / num_processes and averages over ranks. With
    equal numbers of sequences in all microbatches these are the numbers above. TRL's bnpo differs
    where microbatches differ in tokens: it averages their means, so that a token's weight depends
    on its microbatch. To get that, pass tokens of the microbatch * gradient_accumulation_steps (*
    ranks) as normalizer of each.
    """
    check_choice("aggregation", kind, get_args(Aggregation))
    if kind in ("grpo", "luspo"):
        return sequences
    if kind != "dr_grpo":
        return tokens
    if max_completion_length is None or max_completion_length < 1:
        raise ValueError(
            f"max_completion_length is {max_completion_length} but dr_grpo divides by it: pass"
            " the number of tokens that a completion may have, a constant of the run"
        )
    return sequences * max_completion_length


def policy_loss(
    reduce: Reducer,
    terms: Float[Tensor, "*B T"],
    *,
    clipped: Bool[Tensor, "*B T"],
    ratio: Float[Tensor, "*B T"],
    log_ratio: Float[Tensor, "*B T"],
    kl: Float[Tensor, "*B T"] | None = None,
    kl_beta: Number = 0.0,
) -> PolicyLoss:
    """Build a policy loss from its terms and KL penalty, and reduce its metrics alike."""
    log_ratio = log_ratio.detach()
    loss, penalty = reduce(terms), None if kl is None else reduce(kl)
    return PolicyLoss(
        loss=loss if penalty is None else loss + kl_beta * penalty,
        clipped_fraction=reduce(clipped.to(log_ratio.dtype)),
        ratio_mean=reduce(ratio.detach()),
        kl_k3=reduce(torch.expm1(log_ratio) - log_ratio),
        kl_reference=None if penalty is None else penalty.detach(),
    )
