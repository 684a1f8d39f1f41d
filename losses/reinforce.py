"""REINFORCE: the policy gradient itself, without a ratio or with one as a constant weight.

Axes: B sequences (any number of leading axes, also none), T tokens.
Nothing here shifts, packs, counts or computes advantages or baselines.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, policy_loss
from composer_mesh.losses.grpo import cispo_loss
from composer_mesh.losses.logprobs import PolicyLoss, masked_advantages, selected
from composer_mesh.losses.reductions import Number


def reinforce_loss(
    logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "dapo",
) -> PolicyLoss:
    """REINFORCE: loss = sum over the masked tokens of -A logprobs / normalizer.

    `advantages` is one number per sequence [*B] or per token [*B T] and gets no gradient; which
    baseline it contains (RLOO, ReMax, REINFORCE++) is no matter of the loss. On policy: the ratio
    is 1, and its figures say so.

    Source: verl `core_algos.py::compute_policy_loss_gpg`. Differs from it: an empty mask gives 0.
    AReaL's REINFORCE example does not shift mask and reward with its labels and so credits each
    token for its successor; here all tensors are aligned.
    """
    chosen = selected(logprobs, mask)
    nothing = torch.zeros_like(chosen).detach()
    return policy_loss(
        -masked_advantages(advantages, logprobs, mask) * chosen,
        clipped=torch.zeros_like(mask),
        ratio=nothing.exp(),
        log_ratio=nothing,
        mask=mask,
        normalizer=normalizer,
        kind=aggregation,
    )


def weighted_reinforce_loss(
    logprobs: Float[Tensor, "*B T"],
    sampling_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    aggregation: Aggregation = "dapo",
    ratio_min: Number = 0.1,
    ratio_max: Number = 10.0,
) -> PolicyLoss:
    """REINFORCE off policy: -A stop_gradient(clamp(r, ratio_min, ratio_max)) logprobs.

    r = exp(logprobs - sampling_logprobs). Source: torchforge `ReinforceLoss` (6e77f0b3), whose
    bounds are the defaults. The same as `cispo_loss` with both of its bounds.
    """
    return cispo_loss(
        logprobs,
        sampling_logprobs,
        advantages,
        mask,
        normalizer=normalizer,
        aggregation=aggregation,
        clip_low=ratio_min,
        clip_high=ratio_max,
    )
