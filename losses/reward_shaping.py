"""Reward shaping before advantages: combines several rewards, and penalizes length.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt, N reward
functions. Lengths are sampled tokens. All results are detached.

`present` marks existing values; elsewhere nothing is read and results are 0.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from composer_mesh.losses.checks import check_not_negative, check_positive
from composer_mesh.losses.group_advantages import select
from composer_mesh.losses.reductions import Number, at_least_float32


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
