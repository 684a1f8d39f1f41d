"""The policy's entropy at each token, and the mask of the tokens with the highest.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary.

An entropy bonus is `aggregate(token_entropies(...), mask, kind, normalizer)` times a weight,
subtracted from a loss.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_temperature
from composer_mesh.losses.opd import entropy
from composer_mesh.losses.reductions import Number, at_least_float32


def token_entropies(
    logits: Float[Tensor, "*B T V"], temperature: Number = 1.0
) -> Float[Tensor, "*B T"]:
    """Entropy of `softmax(logits / temperature)` at each token, in nats, with its gradient."""
    check_temperature(temperature)
    return entropy((at_least_float32(logits) / temperature).log_softmax(-1))


def high_entropy_mask(
    entropies: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"], fraction: Number = 0.2
) -> Bool[Tensor, "*B T"]:
    """The masked tokens whose entropy is among the highest `fraction` (arXiv 2506.01939).

    Those at or above the (1 - fraction) quantile of all masked entropies passed, interpolated: pass
    the whole step. As `sampling_weights` of a loss, in floating point, it keeps the policy gradient
    on these tokens and normalizer and KL penalty on all, as TRL does.
    Source: TRL `GRPOTrainer.get_high_entropy_mask`, top_entropy_quantile.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction} but has to be in (0, 1]: use 0.2, or 1 for all")
    chosen = at_least_float32(entropies.detach())[mask]
    if chosen.numel() == 0:
        return mask
    ordered = chosen.sort().values
    place = (1 - fraction) * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[low], ordered[high], place - low)
    return mask & (torch.where(mask, at_least_float32(entropies.detach()), 0.0) >= threshold)
