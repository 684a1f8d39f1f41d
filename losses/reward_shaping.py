"""Reward shaping before advantages: combines several rewards, and penalizes length.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt, N reward
functions. Lengths are sampled tokens. All results are detached.

`present` marks existing values; elsewhere nothing is read and results are 0.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from composer_mesh.losses.checks import check_not_negative, check_positive
from composer_mesh.losses.group_advantages import Std, group_advantages, select
from composer_mesh.losses.reductions import Number, at_least_float32


def weighted_rewards(
    rewards: Float[Tensor, "*B N"],
    weights: Float[Tensor, "N"],
    *,
    present: Bool[Tensor, "*B N"] | None = None,
) -> Float[Tensor, "*B"]:
    """Sum of each rollout's rewards times their weights; one that does not apply adds 0.

    Source: TRL `GRPOTrainer`, reward_weights with multi_objective_aggregation
    "sum_then_normalize", where a reward that does not apply is NaN.
    """
    values, _ = select(rewards, present)
    return (values * weights.detach().to(values.dtype)).sum(-1)


def gdpo_advantages(
    rewards: Float[Tensor, "*B G N"],
    weights: Float[Tensor, "N"] | None = None,
    *,
    eps: Number = 1e-4,
    std: Std = "unbiased",
    present: Bool[Tensor, "*B G N"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Advantages of several rewards, each normalized in its group first (GDPO, arXiv 2601.05242).

        a_n = (r_n - mean of the group) / (std of the group + eps)
        a   = sum of w_n a_n
        A   = (a - mean) / (std + eps), over all rollouts passed

    So a reward of large spread does not dominate one of small spread. `weights` are 1 by default. A
    rollout without any reward gets 0 and counts in no statistic. Pass the whole batch. Source: TRL
    `GRPOTrainer`, multi_objective_aggregation "normalize_then_sum". Differs: a group in which only
    one rollout has a reward gets 0 for it; there NaN, with the same effect.
    """
    values, present = select(rewards, present)
    if values.numel() == 0:
        return values.sum(-1)
    parts = group_advantages(
        values.movedim(-1, -2), eps=eps, std=std, present=present.movedim(-1, -2)
    )
    ones = torch.ones(rewards.shape[-1], dtype=values.dtype, device=values.device)
    summed = weighted_rewards(parts.movedim(-1, -2), ones if weights is None else weights)
    some = present.any(-1)
    whole = group_advantages(summed.flatten(), eps=eps, std=std, present=some.flatten())
    return whole.reshape(summed.shape)


def overlong_penalty(
    lengths: Num[Tensor, "*B G"], *, max_length: Number, buffer: Number, factor: Number = 1.0
) -> Float[Tensor, "*B G"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476), to be added to a reward.

        0                                        up to max_length - buffer tokens
        -factor (length - max_length + buffer) / buffer   up to max_length
        -factor                                  beyond

    Source: TRL `get_soft_overlong_punishment` and verl's DAPO reward manager, which has no lower
    bound because no answer is longer there.
    """
    check_positive("max_length", max_length, "use the largest number of tokens of an answer")
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"buffer is {buffer} but has to be above 0 and at most max_length, {max_length}: use a"
            " fifth of it"
        )
    check_not_negative("factor", factor, "use 1.0, or 0 for no penalty")
    excess = at_least_float32(lengths.detach()) - (max_length - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


def kimi_length_reward(
    lengths: Num[Tensor, "*B G"],
    correct: Bool[Tensor, "*B G"],
    *,
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Kimi k1.5's length reward (arXiv 2501.12599), to be added to a reward times a weight.

    s = 1/2 - (length - shortest) / (longest - shortest), of the rollout's group
    s where the answer is correct, min(0, s) where it is not; 0 in a group of equal lengths
    """
    values, present = select(lengths.to(torch.float64), present)
    if values.numel() == 0:
        return values.float()
    longest = torch.where(present, values, -torch.inf).amax(-1, keepdim=True)
    shortest = torch.where(present, values, torch.inf).amin(-1, keepdim=True)
    spread = torch.where(longest > shortest, longest - shortest, 1.0)
    score = torch.where(longest > shortest, 0.5 - (values - shortest) / spread, 0.0)
    score = torch.where(correct, score, score.clamp(max=0))
    return torch.where(present, score, 0.0).float()


def grpo_lead_length_reward(
    rewards: Float[Tensor, "*B G"],
    lengths: Num[Tensor, "*B G"],
    correct: Bool[Tensor, "*B G"],
    *,
    alpha: Number = 0.05,
    eps: Number = 1e-6,
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """GRPO-LEAD's length-dependent accuracy reward (arXiv 2504.09696), to be added to the rewards.

        z = (length - mean) / (std + eps), over the group's correct rollouts; std unbiased
        r (exp(-alpha z) - 1)   where the answer is correct, so that r becomes r exp(-alpha z)
        0                       where it is not

    A group's only correct rollout keeps its reward. Source: GRPO-LEAD's `get_reweight_rewards`
    (577c63ce). Differs: there a group whose three shortest rollouts have at most 4,000 tokens on
    average is left alone, and `correct` means a reward above 0. The paper's penalty of wrong
    answers (-1) is the task's, and its reweighting by difficulty is not part of this.
    """
    check_not_negative("alpha", alpha, "use 0.05, or 0 for no length reward")
    values, present = select(rewards, present)
    counted = present & correct
    sizes = torch.where(counted, lengths.detach().to(values.dtype), 0.0)
    count = counted.sum(-1, keepdim=True)
    mean = sizes.sum(-1, keepdim=True) / count.clamp(min=1)
    off = torch.where(counted, sizes - mean, 0.0)
    std = (off.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(counted, values * torch.expm1(-alpha * off / (std + eps)), 0.0)


def relative_length_penalty(
    rewards: Float[Tensor, "*B G"],
    lengths: Num[Tensor, "*B G"],
    *,
    weight: Number,
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """PRIME-RL's length penalty, by a rollout's length relative to the longest of its group.

        -weight * mean reward of the group * length / longest of the group

    A group that never succeeds is not penalized. To be added to the rewards. Source: PRIME-RL
    `GRPOAlgorithm.score_group` (559b4477), num_output_tokens_weight; the other weights are the same
    for input tokens and for turns.
    """
    check_not_negative("weight", weight, "use 0.1, or 0 for no penalty")
    values, present = select(rewards, present)
    sizes = torch.where(present, lengths.detach().to(values.dtype), 0.0)
    if values.numel() == 0:
        return values
    mean = values.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)
    return -weight * mean * sizes / sizes.amax(-1, keepdim=True).clamp(min=1)
