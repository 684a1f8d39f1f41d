"""Advantages of single tokens, from rewards on tokens.

Axes: B sequences (any number of leading axes, also none), G rollouts of one prompt, T tokens.

Tokens outside of the mask (padding, tool output) get 0, and their values, also NaN, are never read.
Callers put rewards on tokens: a reward of the complete answer is on its last token.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_choice
from composer_mesh.losses.group_advantages import Singleton, centre, select
from composer_mesh.losses.reductions import at_least_float32


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, "*B G"],
    mask: Bool[Tensor, "*B G T"],
    *,
    singleton: Singleton = "raw",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G T"]:
    """Group-centred rewards on every token, whitened over all masked tokens (REINFORCE++ baseline).

        A = masked_whiten(r - mean of the group, mask)

    arXiv 2501.03262. A group of one keeps its reward before whitening, "zero" makes it 0. Detached;
    fewer than two tokens give 0, where verl raises. An absent rollout counts neither in its group
    nor in the whitening. Source: verl `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """
    check_choice("singleton", singleton, ("zero", "raw"))
    values, present = select(rewards, present)
    if mask.numel() == 0:
        return values.unsqueeze(-1).expand_as(mask)
    per_token = centre(values, present, singleton).unsqueeze(-1).expand_as(mask)
    return masked_whiten(per_token, mask & present.unsqueeze(-1))


def masked_whiten(values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Values less their masked mean, over their masked standard deviation, detached.

        n    = number of masked values + 1e-8        var = unbiased variance
        mean = sum / n                               (x - mean) / sqrt(var + 1e-8)

    Statistics are taken in float64 over the whole tensor that is passed, so pass the whole batch:
    nothing is reduced over ranks. Source: verl `torch_functional.masked_whiten`, down to the 1e-8
    in the count: it is lost in float32, where equal values get 0, and leaves them up to 1e-4 |x| /
    n in float64. Differs: 0 under no mask (verl's callers multiply by the mask), and fewer than two
    masked values give 0, where verl raises.
    """
    x = torch.where(mask, values.detach().double(), 0.0)
    dtype = at_least_float32(values).dtype
    count = mask.sum(dtype=dtype)
    n = (count + 1e-8).double()
    mean = x.sum() / n
    centred = torch.where(mask & (count > 1), x - mean, 0.0)
    variance = (centred**2).sum() / n * (count / (count - 1).clamp(min=1))
    return (centred * torch.rsqrt(variance + 1e-8)).to(dtype)
