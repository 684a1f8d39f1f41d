"""Advantages of complete rollouts: a rollout's reward relative to the others of its prompt.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt.

`present` marks the rollouts that exist, for groups of unequal size; the others get 0, and their
values, also NaN, are never read. The caller leaves a failed rollout out, and never scores it as 0.

Reward shaping penalizes length before advantages, also detached; lengths are sampled tokens. Of
single tokens (T), those outside of the mask (padding, tool output) get 0, and their values, also
NaN, are never read.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from composer_mesh.losses.reductions import (
    Number,
    at_least_float32,
    check_choice,
    check_not_negative,
    check_positive,
)

Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "raw"]
Std = Literal["unbiased", "population"]


def group_advantages(
    rewards: Float[Tensor, "*B G"],
    eps: Number = 1e-4,
    *,
    std: Std = "unbiased",
    scale: Scale = "group",
    singleton: Singleton = "zero",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Rewards relative to their group, detached.

        (r - mean) / (std + eps)    GRPO, arXiv 2402.03300
        r - mean                    Dr. GRPO, arXiv 2503.20783, with scale "none"

    `scale` names whose std divides: the "group"'s, or with "batch" that of all rewards (TRL's
    scale_rewards). `std` is "unbiased", over n - 1, or "population", over n.

    A group of equal rewards gets exactly 0. So does a group of one, unless `singleton` is "raw":
    then its mean counts as 0 and its std as 1, verl's convention.

    Sources, by std and eps: TRL `GRPOTrainer` (unbiased, 1e-4; a NaN reward is `present` False
    there), verl `compute_grpo_outcome_advantage` (unbiased, 1e-6, raw singletons), oat (unbiased,
    1e-8), torchforge (unbiased, 1e-4), torchtitan (population, 1e-6), prime-rl (scale "none").
    """
    check_choice("std", std, ("unbiased", "population"))
    check_choice("scale", scale, ("group", "batch", "none"))
    values, present = select(rewards, present)
    centred = centre(values, present, singleton)
    if scale == "none":
        return centred
    if scale == "group":
        deviation = _std(values, present, std, singleton)
    else:
        deviation = _std(values.flatten(), present.flatten(), std, singleton)
    # Zero stays zero, also with a std and an eps of 0.
    return torch.where(centred == 0, 0.0, centred / (deviation + eps))


def rloo_advantages(
    rewards: Float[Tensor, "*B G"],
    *,
    singleton: Singleton = "raw",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Rewards less the mean of the others of their group (RLOO, arXiv 2402.14740), detached.

        r - mean of the other n - 1 = (r - mean) n / (n - 1)

    Equal rewards get exactly 0. A group of one has no others: "raw" keeps its reward, as verl's
    `compute_rloo_outcome_advantage` does, "zero" gives 0, as TRL's `RLOOTrainer` and verl's
    vectorized form do.
    """
    values, present = select(rewards, present)
    # In the dtype of the rewards: a quotient of two counts would be float32.
    count = present.sum(-1, keepdim=True, dtype=values.dtype)
    leave_one_out = torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)
    return centre(values, present, singleton) * leave_one_out


def max_rl_advantages(
    rewards: Float[Tensor, "*B G"], *, present: Bool[Tensor, "*B G"] | None = None
) -> Float[Tensor, "*B G"]:
    """Rewards relative to the mean of their group (max-RL, arXiv 2602.02710), detached.

        (r - mean) / mean

    For rewards >= 0, usually 0 or 1: a prompt that is solved in one of n tries weighs n times one
    that always is. A group whose mean is 0 or less gets 0; so do equal
    rewards and a group of one. Source: prime-rl `MaxRLAlgorithm.score_group`.
    """
    values, present = select(rewards, present)
    mean = _mean(values, present)
    scores = centre(values, present, "zero") / torch.where(mean > 0, mean, 1.0)
    return torch.where(mean > 0, scores, 0.0)


def opo_advantages(
    rewards: Float[Tensor, "*B G"],
    lengths: Num[Tensor, "*B G"],
    *,
    singleton: Singleton = "raw",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Rewards less their length-weighted mean (OPO, arXiv 2505.23585), detached.

        r - sum of (length * r) / sum of lengths

    The baseline of least variance if gradients of tokens are alike. Equal rewards get exactly 0. A
    group of one keeps its reward, as in verl; "zero" makes it 0. A group without a token has the
    plain mean. Source: verl `compute_opo_outcome_advantage`.
    """
    values, present = select(rewards, present)
    sizes = torch.where(present, lengths.detach().to(values.dtype), 0.0)
    weights = torch.where(sizes.sum(-1, keepdim=True) > 0, sizes, present.to(values.dtype))
    centred = centre(values, present, singleton)
    mean = (weights * centred).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=1)
    alone = present.sum(-1, keepdim=True) == 1
    return torch.where(alone | ~present, centred, centred - mean)


def gpg_advantages(
    rewards: Float[Tensor, "*B G"],
    *,
    singleton: Singleton = "raw",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Rewards less their group's mean, times rollouts over rewarded rollouts (GPG), detached.

        (r - mean) * rollouts / rollouts whose reward is not 0

    arXiv 2504.02546; the factor, of all rollouts passed, makes up for those without a signal. Its
    loss is `reinforce_loss`. Pass the whole batch. A group of one keeps its reward, as in verl;
    "zero" makes it 0. Source: verl `compute_gpg_outcome_advantage` with f_norm 1.
    """
    values, present = select(rewards, present)
    # In the dtype of the rewards: a quotient of two counts would be float32.
    rewarded = (values != 0).sum(dtype=values.dtype).clamp(min=1)
    return centre(values, present, singleton) * (present.sum() / rewarded)


def select(rewards: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rewards with 0 for absent rollouts, and the mask of present ones."""
    values = at_least_float32(rewards.detach())
    if present is None:
        return values, torch.ones_like(values, dtype=torch.bool)
    return torch.where(present, values, 0.0), present


def _mean(values: Float[Tensor, "*B G"], present: Bool[Tensor, "*B G"]) -> Float[Tensor, "*B 1"]:
    """Return the mean over the rollouts present; 0 without any."""
    return values.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)


def centre(
    values: Float[Tensor, "*B G"], present: Bool[Tensor, "*B G"], singleton: Singleton
) -> Float[Tensor, "*B G"]:
    """Return rewards less their group's mean: exactly 0 for equal and absent ones."""
    check_choice("singleton", singleton, ("zero", "raw"))
    if values.numel() == 0:
        return values
    # The rounded mean of equal numbers may differ from them, which 1 / eps would amplify.
    highest = torch.where(present, values, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(present, values, torch.inf).amin(-1, keepdim=True)
    centred = torch.where(present & (highest != lowest), values - _mean(values, present), 0.0)
    if singleton == "zero":
        return centred
    return torch.where(present.sum(-1, keepdim=True) == 1, values, centred)


def _std(
    values: Float[Tensor, "*B G"], present: Bool[Tensor, "*B G"], std: Std, singleton: Singleton
) -> Float[Tensor, "*B 1"]:
    """Standard deviation over the rollouts present; 1 for a group of one that is kept raw."""
    count = present.sum(-1, keepdim=True)
    squares = (centre(values, present, "zero") ** 2).sum(-1, keepdim=True)
    deviation = (squares / (count - int(std == "unbiased")).clamp(min=1)).sqrt()
    return torch.where(count == 1, 1.0, deviation) if singleton == "raw" else deviation


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
            f"buffer is {buffer} but must be above 0 and at most max_length, {max_length}: use a"
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
