"""Advantages of a rollout, a turn or a token over a baseline, all exported here.

`group_advantages` gives one number per rollout or per token, this module one per turn, from the
rewards that were given at turns and at the end. Everything is computed from the whole batch,
without gradient, and not reduced over ranks, so gather rewards first.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt, K turns of the
longest rollout, P prompts.

`mask` marks the turns that exist; others get 0, and their values, also NaN, are never read. The
reward of a whole rollout is on its last turn, unless a function takes it as `outcomes`. All results
are detached.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.losses.group_advantages import (
    Scale,
    Singleton,
    Std,
    gpg_advantages,
    group_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    masked_whiten,
    max_rl_advantages,
    opo_advantages,
    overlong_penalty,
    reinforce_plus_plus_baseline_advantages,
    relative_length_penalty,
    rloo_advantages,
    select,
)
from composer_mesh.losses.reductions import (
    Number,
    check_choice,
    check_fraction,
    check_not_negative,
)

__all__ = [
    "Baseline",
    "Scale",
    "Singleton",
    "Std",
    "gigpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "grpo_lead_length_reward",
    "kimi_length_reward",
    "masked_whiten",
    "max_rl_advantages",
    "mt_grpo_advantages",
    "opo_advantages",
    "overlong_penalty",
    "reinforce_plus_plus_baseline_advantages",
    "relative_length_penalty",
    "rloo_advantages",
    "turn_return_advantages",
    "turn_returns",
]


Baseline = Literal["turn", "group"]


def turn_returns(
    rewards: Float[Tensor, "*B K"], mask: Bool[Tensor, "*B K"], gamma: Number = 1.0
) -> Float[Tensor, "*B K"]:
    """Discounted reward still to come at each turn: R_k = r_k + gamma R_(k+1)."""
    check_fraction("gamma", gamma, "use 1 for no discount")
    values, mask = select(rewards, mask)
    returns = torch.zeros_like(values)
    running = torch.zeros_like(values[..., 0]) if values.shape[-1] else None
    for turn in reversed(range(values.shape[-1])):
        assert running is not None
        running = values[..., turn] + gamma * running
        returns[..., turn] = running
    return torch.where(mask, returns, 0.0)


def turn_return_advantages(
    rewards: Float[Tensor, "*B G K"],
    mask: Bool[Tensor, "*B G K"],
    *,
    gamma: Number = 1.0,
    baseline: Baseline = "turn",
    eps: Number = 1e-4,
    std: Std = "unbiased",
    scale: Scale = "group",
) -> Float[Tensor, "*B G K"]:
    """Returns of turns relative to others of their group.

        A_k = (R_k - mean) / (std + eps),  R from `turn_returns`

    `baseline` "turn" compares turn k with turn k of the group's other rollouts, so that one which
    only a single rollout has gets 0; "group" compares all turns of all rollouts, as GTPO (arXiv
    2511.14846) does. `scale`, `std` and `eps` are those of `group_advantages`. With rewards at the
    end only, no discount and rollouts of equal length, "turn" is `group_advantages` on every turn.
    """
    check_choice("baseline", baseline, ("turn", "group"))
    returns = turn_returns(rewards, mask, gamma)
    if baseline == "group":
        flat = group_advantages(
            returns.flatten(-2), eps=eps, std=std, scale=scale, present=mask.flatten(-2)
        )
        return flat.reshape(returns.shape)
    return _of_equal_turns(returns, mask, eps, std, scale)


def mt_grpo_advantages(
    rewards: Float[Tensor, "*B G K"],
    outcomes: Float[Tensor, "*B G"],
    mask: Bool[Tensor, "*B G K"],
    *,
    outcome_weight: Number = 1.0,
    eps: Number = 1e-4,
    std: Std = "unbiased",
    scale: Scale = "group",
) -> Float[Tensor, "*B G K"]:
    """Each turn's own reward and the rollout's outcome, both relative to the group (MT-GRPO).

        A_k = T_k + outcome_weight O   before the last turn
        A_k = T_k + O                  at the last turn

    T compares a turn's reward with those of the same turn of the other rollouts, O the outcomes;
    both as in `group_advantages`. A turn gets no credit for the turn rewards of later ones. Without
    turn rewards and with weight 1 it is `group_advantages`. Source: arXiv 2505.11821, where the
    last turn has an outcome only. Differs: its form for more than two turns samples a tree, here
    the rollouts of a group are chains.
    """
    check_not_negative("outcome_weight", outcome_weight, "use 1.0")
    present = mask.any(-1)
    outcome = group_advantages(outcomes, eps=eps, std=std, scale=scale, present=present)
    last = mask & ~torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], -1)
    own = _of_equal_turns(rewards, mask, eps, std, scale)
    found = own + torch.where(last, 1.0, float(outcome_weight)) * outcome.unsqueeze(-1)
    return torch.where(mask, found, 0.0)


def gigpo_advantages(
    rewards: Float[Tensor, "P G K"],
    totals: Float[Tensor, "P G"],
    mask: Bool[Tensor, "P G K"],
    states: Int[Tensor, "P G K"],
    *,
    gamma: Number = 0.95,
    step_weight: Number = 1.0,
    eps: Number = 1e-4,
    std: Std = "unbiased",
    scale: Scale = "group",
) -> Float[Tensor, "P G K"]:
    """The rollout's advantage, and that of a turn among turns from the same state (GiGPO).

        A_k = E + step_weight S_k
        E   = the rollout's total reward relative to its group
        S_k = R_k relative to the turns of the group with the same number in `states`

    R is from `turn_returns`; "relative" as in `group_advantages`, `scale` "none" for no standard
    deviation. A state that a single turn has seen gives it S_k = 0. Source: arXiv 2505.10978.
    """
    check_not_negative("step_weight", step_weight, "use 1.0, or 0 for GRPO")
    values, mask = select(rewards, mask)
    episode = group_advantages(totals, eps=eps, std=std, scale=scale, present=mask.any(-1))
    if not mask.any():
        return values
    returns = turn_returns(rewards, mask, gamma)
    prompts = torch.arange(len(mask), device=mask.device)[:, None, None].expand_as(mask)
    key = torch.stack([prompts[mask], states[mask]])
    _, group = torch.unique(key, dim=1, return_inverse=True)
    table, present, place = _table(returns[mask], group)
    steps = group_advantages(table, eps=eps, std=std, scale=scale, present=present)
    found = torch.zeros_like(returns)
    found[mask] = steps[group, place]
    return torch.where(mask, episode.unsqueeze(-1) + step_weight * found, 0.0)


def _of_equal_turns(
    values: Tensor, mask: Tensor, eps: Number, std: Std, scale: Scale
) -> Float[Tensor, "*B G K"]:
    """Compare each turn with the same turn of the group's other rollouts."""
    columns, present = values.transpose(-1, -2), mask.transpose(-1, -2)
    found = group_advantages(
        columns.contiguous(), eps=eps, std=std, scale=scale, present=present.contiguous()
    )
    return found.transpose(-1, -2)


def _table(
    values: Float[Tensor, "N"], group: Int[Tensor, "N"]
) -> tuple[Tensor, Tensor, Int[Tensor, "N"]]:
    """Lay values out by group: a padded table, which of it is present, and each value's column."""
    sizes = torch.bincount(group)
    order = torch.argsort(group, stable=True)
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    table = torch.zeros(len(sizes), int(sizes.max()), dtype=values.dtype, device=values.device)
    present = torch.zeros_like(table, dtype=torch.bool)
    table[group, place], present[group, place] = values, True
    return table, present, place
