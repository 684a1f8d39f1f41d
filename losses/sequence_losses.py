"""Policy losses of whole sequences: GMPO's geometric mean and VESPO's soft sequence weight.

Axes: B sequences (any number of leading axes, also none), T tokens. One sequence per row, with one
advantage.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, Reducer, Reduction, policy_loss
from composer_mesh.losses.logprobs import (
    PolicyLoss,
    check_one_per_sequence,
    masked_advantages,
    masked_log_ratio,
    masked_mean,
    per_token,
    selected,
)
from composer_mesh.losses.reductions import Number, check_not_negative, check_positive


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
