"""Advantages of complete rollouts: a rollout's reward relative to the others of its prompt.

Axes: B prompts (any number of leading axes, also none), G rollouts of one prompt.

`present` marks the rollouts that exist, for groups of unequal size; the others get 0, and their
values, also NaN, are never read. The caller leaves a failed rollout out, and never scores it as 0.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from composer_mesh.losses.checks import check_choice
from composer_mesh.losses.reductions import Number, at_least_float32

AdvantageKind = Literal["group_std", "group_mean"]
Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "raw"]
Std = Literal["unbiased", "population"]

_SCALE_OF: dict[str, Scale] = {"group_std": "group", "group_mean": "none"}


def group_advantages(
    rewards: Float[Tensor, "*B G"],
    kind: AdvantageKind = "group_std",
    eps: Number = 1e-4,
    *,
    std: Std = "unbiased",
    scale: Scale | None = None,
    singleton: Singleton = "zero",
    present: Bool[Tensor, "*B G"] | None = None,
) -> Float[Tensor, "*B G"]:
    """Rewards relative to their group, detached.

        group_std   (r - mean) / (std + eps)    GRPO, arXiv 2402.03300
        group_mean   r - mean                   Dr. GRPO, arXiv 2503.20783

    `scale` names whose std divides, and wins over `kind`: "group" is group_std, "none" is
    group_mean, "batch" divides the group-centred reward by the std of all rewards (TRL's
    scale_rewards). `std` is "unbiased", over n - 1, or "population", over n.

    A group of equal rewards gets exactly 0. So does a group of one, unless `singleton` is "raw":
    then its mean counts as 0 and its std as 1, verl's convention.

    Sources, by std and eps: TRL `GRPOTrainer` (unbiased, 1e-4; a NaN reward is `present` False
    there), verl `compute_grpo_outcome_advantage` (unbiased, 1e-6, raw singletons), oat (unbiased,
    1e-8), torchforge (unbiased, 1e-4), torchtitan (population, 1e-6), prime-rl (group_mean).
    """
    check_choice("kind", kind, ("group_std", "group_mean"))
    check_choice("std", std, ("unbiased", "population"))
    check_choice("singleton", singleton, ("zero", "raw"))
    by = scale or _SCALE_OF[kind]
    check_choice("scale", by, ("group", "batch", "none"))
    values, present = select(rewards, present)
    if values.numel() == 0:
        return values
    centred = centre(values, present, singleton)
    if by == "none":
        return centred
    if by == "group":
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
    check_choice("singleton", singleton, ("zero", "raw"))
    values, present = select(rewards, present)
    if values.numel() == 0:
        return values
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
    if values.numel() == 0:
        return values
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
    check_choice("singleton", singleton, ("zero", "raw"))
    values, present = select(rewards, present)
    if values.numel() == 0:
        return values
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
    check_choice("singleton", singleton, ("zero", "raw"))
    values, present = select(rewards, present)
    if values.numel() == 0:
        return values
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
