"""Log-probabilities of whole answers from those of their tokens, and how typical an answer is.

Axes: B answers (any number of leading axes, also none), T tokens, V vocabulary.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.losses.reductions import Number, at_least_float32


def sequence_logprobs(
    token_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    ld_alpha: Number | None = None,
    shared_lengths: Int[Tensor, "*B"] | None = None,
) -> Float[Tensor, "*B"]:
    """Log-probability of each answer: the sum over its tokens, 0 for an answer without any.

    With `mask.sum(-1)` as its length, it is the input of every preference loss.

    `ld_alpha` weighs the tokens beyond the first `shared_lengths` of an answer (LD-DPO, arXiv
    2409.06411): 1 changes nothing, 0 leaves them out. The shared length of a pair is that of its
    shorter answer; policy and reference are to be summed alike. Agrees with TRL's
    `DPOTrainer._compute_loss`.
    """
    values = torch.where(mask, at_least_float32(token_logprobs), 0.0)
    if ld_alpha is None and shared_lengths is None:
        return values.sum(-1)
    if ld_alpha is None or shared_lengths is None:
        raise ValueError(
            f"ld_alpha is {ld_alpha} and shared_lengths are"
            f" {'not ' if shared_lengths is None else ''}given: pass both, or neither"
        )
    if not 0 <= ld_alpha <= 1:
        raise ValueError(
            f"ld_alpha is {ld_alpha} but has to be in [0, 1]: 1 weighs all tokens alike, 0 leaves"
            " out what is beyond the shared length"
        )
    beyond = mask.cumsum(-1) > shared_lengths.unsqueeze(-1)
    return torch.where(beyond, ld_alpha * values, values).sum(-1)


def wpo_weights(
    token_logprobs: Float[Tensor, "*B T"],
    collision_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B"]:
    """How typical each answer is of the policy, detached (WPO, arXiv 2406.11827, equation 2).

        w = exp(mean over tokens of (log p(token) - log sum over v of p(v)^2))

    A pair's weight is the product of those of its answers: `weights` of the preference losses. An
    answer without tokens has 1. `collision_logprobs` are those of the function of that name.
    Agrees with TRL's `use_weighting`.
    """
    aligned = at_least_float32(token_logprobs.detach()) - at_least_float32(
        collision_logprobs.detach()
    )
    return (torch.where(mask, aligned, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).exp()


def collision_logprobs(logits: Float[Tensor, "*B T V"]) -> Float[Tensor, "*B T"]:
    """Log-probability that two samples of a row are equal, log sum p^2; detached."""
    scores = at_least_float32(logits.detach())
    return (2 * scores).logsumexp(-1) - 2 * scores.logsumexp(-1)
