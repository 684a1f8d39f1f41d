"""Preference losses: raise the chosen answer over the rejected one.

Axes: B pairs or sequences (any number of leading axes, also none), T tokens.

Nothing here decides which answer is better or runs the reference model.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_mesh.losses.reductions import Number, at_least_float32, normalized_sum


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss and what it saw; every figure is a sum over the loss' normalizer.

    `margin` is the implicit reward of the chosen answer less that of the rejected one, `accuracy`
    the share of pairs with a positive margin. Both are detached.
    """

    loss: Float[Tensor, ""]
    margin: Float[Tensor, ""]
    accuracy: Float[Tensor, ""]


def sequence_logprobs(
    token_logprobs: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B"]:
    """Log-probability of each answer: the sum over its tokens, 0 for an answer without any."""
    return torch.where(mask, at_least_float32(token_logprobs), 0.0).sum(-1)


def dpo_loss(
    chosen: Float[Tensor, "*B"],
    rejected: Float[Tensor, "*B"],
    reference_chosen: Float[Tensor, "*B"],
    reference_rejected: Float[Tensor, "*B"],
    *,
    beta: Number = 0.1,
    normalizer: Number,
    label_smoothing: Number = 0.0,
) -> PreferenceLoss:
    """Direct preference optimization (arXiv 2305.18290), from summed answer log-probs.

        z    = beta ((chosen - reference_chosen) - (rejected - reference_rejected))
        loss = sum over pairs of -(1 - e) log sigmoid(z) - e log sigmoid(-z), over normalizer

    `normalizer` is the number of pairs in the whole step; e is `label_smoothing`, cDPO's chance
    that a pair is the wrong way round. The reference gets no gradient. No pairs give 0.
    TRL since 2026 ignores label_smoothing for this loss; its older `dpo_loss` is the one above.
    """
    _check(beta, label_smoothing)
    reference = at_least_float32(reference_chosen) - at_least_float32(reference_rejected)
    policy = at_least_float32(chosen) - at_least_float32(rejected)
    z = beta * (policy - reference.detach())
    per_pair = -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
    margin = z.detach()
    return PreferenceLoss(
        loss=normalized_sum(per_pair, normalizer),
        margin=normalized_sum(margin, normalizer),
        accuracy=normalized_sum((margin > 0).to(margin.dtype), normalizer),
    )


def _check(beta: Number, label_smoothing: Number) -> None:
    if not beta > 0:
        raise ValueError(f"dpo beta is {beta} but has to be > 0: use 0.1")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing} but has to be in [0, 0.5):"
            " from 0.5 on, pairs teach the opposite; swap chosen and rejected instead"
        )
