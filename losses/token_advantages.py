"""Advantages of single tokens, from rewards on tokens.

Axes: B sequences (any number of leading axes, also none), G rollouts of one prompt, T tokens.

Tokens outside of the mask (padding, tool output) get 0, and their values, also NaN, are never read.
Callers put rewards on tokens: a reward of the complete answer is on its last token.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_choice
from composer_mesh.losses.group_advantages import Singleton, centre, select
from composer_mesh.losses.normalization import masked_whiten
from composer_mesh.losses.reductions import Number, at_least_float32

Gaps = Literal["carry", "reset"]


def remax_token_advantages(
    token_rewards: Float[Tensor, "*B T"],
    greedy_rewards: Float[Tensor, "*B"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    """Reward still to come at each token, less the greedy answer's reward (ReMax), detached.

        A_t = sum of rewards of the masked tokens from t on - greedy

    arXiv 2310.10505. Source: verl `compute_remax_outcome_advantage`, except that NaN under no mask
    is ignored here and a gap in the mask gets 0, not the reward to come.
    """
    rewards = torch.where(mask, at_least_float32(token_rewards.detach()), 0.0)
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    greedy = at_least_float32(greedy_rewards.detach()).unsqueeze(-1)
    return torch.where(mask, to_go - greedy, 0.0)


def reinforce_plus_plus_advantages(
    token_rewards: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    gamma: Number = 1.0,
    *,
    gaps: Gaps = "carry",
) -> Float[Tensor, "*B T"]:
    """Discounted returns, whitened over all masked tokens (REINFORCE++, arXiv 2501.03262).

        R_t = reward_t + gamma R_(t+1)
        A   = masked_whiten(R, mask)

    A gap inside the mask (tool output) is skipped, undiscounted, and the return carries across it:
    verl's `compute_reinforce_plus_plus_outcome_advantage` of 2026. `gaps="reset"` starts again from
    0 before each gap, verl's until then. Both ignore rewards under no mask, so without gaps they
    agree. Detached; fewer than two tokens give 0, where verl raises.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma} but has to be in [0, 1]: use 1 for no discount")
    check_choice("gaps", gaps, ("carry", "reset"))
    rewards = torch.where(mask, at_least_float32(token_rewards.detach()), 0.0)
    running, returns = torch.zeros_like(rewards[..., 0]), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[-1])):
        across = running if gaps == "carry" else 0.0
        running = torch.where(mask[..., t], rewards[..., t] + gamma * running, across)
        returns[..., t] = running
    return masked_whiten(returns, mask)


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
