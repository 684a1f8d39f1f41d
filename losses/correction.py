"""Weights that correct for the mismatch between the sampler and the policy it was loaded from.

Axes: B sequences (any number of leading axes, also none), T tokens. One sequence per row.

The weights are constants that a loss multiplies its terms by. Products of weights are weights.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_choice, check_not_negative, check_positive
from composer_mesh.losses.logprobs import (
    bounded,
    masked_log_ratio,
    masked_mean,
    per_token,
    selected,
)
from composer_mesh.losses.reductions import Number

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


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
    check_choice("mode", mode, MODES)
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
            f"minimum is {minimum} but has to be <= maximum, {maximum}: raise maximum or lower it"
        )
