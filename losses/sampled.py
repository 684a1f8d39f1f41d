"""Distillation on the sampled tokens alone: the reverse KL as a policy gradient.

Axes: B sequences (any number of leading axes, also none), T tokens.

Position t of every tensor is the same sampled token, in the context of either side; callers sample
and shift, and the teacher gives that token's log-prob only.

With `reduction="none"` every loss returns its terms per token [*B T], 0 outside of the mask and not
divided; their sum over the normalizer is the loss.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    reduce_selected,
)

# Bound of log-ratios before the clip (SDPO's bound).
LOG_IMPORTANCE_LIMIT = 20.0


def sampled_reverse_kl(
    logprobs: Float[Tensor, "*B T"],
    teacher_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    old_logprobs: Float[Tensor, "*B T"] | None = None,
    is_clip: Number | None = 2.0,
    weights: Float[Tensor, "*B T"] | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Reverse KL(student || teacher) from sampled tokens, as REINFORCE with a dense reward.

        A    = constant(teacher_logprobs - logprobs)
        loss = -sum of w A logprobs over the masked tokens / normalizer

    On tokens that the student sampled, the gradient is an unbiased estimate of that of the
    KL at each token's context; the value is no divergence and may have either sign. A larger KL
    does not mean a larger loss: watch the mean of -A instead.

    With `old_logprobs`, the student's when it sampled, w is `importance_weights`; `weights`
    multiplies in further constants. Either is detached, as are A and the teacher. Log-probs
    are nats per token, both under the temperature of sampling; `normalizer` is the token count
    of the whole step.

    Source: OPSD (`compute_loss` with `use_tinker_loss`), SDPO (`compute_self_distillation_loss`
    without full logits) and TRL (`compute_sampled_token_self_distillation_loss`), which agree.
    Differs: an empty mask gives 0, where OPSD gives NaN; TRL averages each sequence first, which
    is `weights` of one over the sequence's tokens and the number of sequences as normalizer.
    """
    student = at_least_float32(logprobs[mask])
    advantage = at_least_float32(teacher_logprobs.detach()[mask]) - student.detach()
    per_token = -advantage * student
    if old_logprobs is not None:
        per_token = per_token * importance_weights(student, old_logprobs[mask], is_clip)
    if weights is not None:
        per_token = per_token * weights.detach()[mask]
    return reduce_selected(per_token, mask, normalizer, reduction)


def importance_weights(
    logprobs: Float[Tensor, "*B"], old_logprobs: Float[Tensor, "*B"], is_clip: Number | None = 2.0
) -> Float[Tensor, "*B"]:
    """Detached weights min(exp(logprobs - old_logprobs), is_clip), for tokens sampled earlier.

    Log-ratios count as at most 20 either way; None for `is_clip` gives weights of 1. Source:
    SDPO (arXiv 2601.20802, `compute_self_distillation_loss`), TRL
    (`apply_importance_sampling_clipping`).
    """
    if is_clip is None:
        return torch.ones_like(at_least_float32(logprobs.detach()))
    if not is_clip > 0:
        raise ValueError(f"is_clip is {is_clip} but has to be > 0: use 2.0, or None for no weights")
    log_ratio = at_least_float32(logprobs.detach()) - at_least_float32(old_logprobs.detach())
    log_ratio = log_ratio.clamp(-LOG_IMPORTANCE_LIMIT, LOG_IMPORTANCE_LIMIT)
    return log_ratio.exp().clamp(max=is_clip)
