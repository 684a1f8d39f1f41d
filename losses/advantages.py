"""Advantages: how much better a rollout did than the others of its prompt.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt.

Nothing here looks at tokens or knows why a rollout is missing from its group: a failed rollout
is left out by the caller, never scored as 0.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from composer_mesh.losses.reductions import Number, at_least_float32

AdvantageKind = Literal["group_std", "group_mean"]


def group_advantages(
    rewards: Float[Tensor, "*B G"], kind: AdvantageKind = "group_std", eps: Number = 1e-4
) -> Float[Tensor, "*B G"]:
    """Rewards relative to their group, detached.

        group_std   (r - mean) / (std + eps)    GRPO, arXiv 2402.03300
        group_mean   r - mean                   Dr. GRPO, arXiv 2503.20783

    The std is the unbiased one (divided by G - 1) and eps is added outside the root, TRL's
    convention; verl adds 1e-6, oat 1e-8, and torchtitan takes the population std. A group of
    equal rewards, and so a group of one, gets exactly 0.
    """
    if kind not in ("group_std", "group_mean"):
        raise ValueError(f"kind is {kind!r}: use 'group_std' or 'group_mean'")
    values = at_least_float32(rewards.detach())
    if values.shape[-1] == 0:
        return values
    scores = values - values.mean(-1, keepdim=True)
    if kind == "group_std":
        scores = scores / (_unbiased_std(values) + eps)
    # The rounded mean of equal numbers may miss them, and 1 / eps would make that visible.
    equal = values.amax(-1, keepdim=True) == values.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, scores)


def _unbiased_std(values: Float[Tensor, "*B G"]) -> Float[Tensor, "*B 1"]:
    """Standard deviation over G - 1; 1 for a group of one, which has none."""
    if values.shape[-1] == 1:
        return torch.ones_like(values)
    return values.std(-1, correction=1, keepdim=True)
