"""REINFORCE: the policy gradient itself, without a ratio.

Axes: B sequences (any number of leading axes, also none), T tokens. Callers shift, pack, count and
compute advantages or baselines.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.aggregation import Aggregation, Reducer, Reduction, policy_loss
from composer_mesh.losses.logprobs import PolicyLoss, masked_advantages, selected, weighted_terms
from composer_mesh.losses.reductions import Number


def reinforce_loss(
    logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
    sampling_weights: Float[Tensor, "..."] | None = None,
) -> PolicyLoss:
    """REINFORCE: loss = sum over the masked tokens of -w A logprobs / normalizer.

    `advantages` is one number per sequence [*B] or per token [*B T] and gets no gradient; which
    baseline it contains (RLOO, ReMax, REINFORCE++) is up to the caller. On policy: the ratio
    is 1, as in its metrics. Off policy, `sampling_weights` w, one per token or sequence,
    correct for it: see `losses/correction.py`. With w the ratio to the sampler, clamped,
    this is `cispo_loss`. `reduction` "none" returns -w A logprobs per token and reads no
    normalizer.

    Source: verl `core_algos.py::compute_policy_loss_gpg`. Differs from it: an empty mask gives 0.
    AReaL's REINFORCE example does not shift mask and reward with its labels and so credits each
    token for its successor; here all tensors are aligned.
    """
    chosen = selected(logprobs, mask)
    nothing = torch.zeros_like(chosen).detach()
    terms = -masked_advantages(advantages, logprobs, mask) * chosen
    return policy_loss(
        Reducer(mask, aggregation, normalizer, reduction),
        weighted_terms(terms, sampling_weights, mask),
        clipped=torch.zeros_like(mask),
        ratio=nothing.exp(),
        log_ratio=nothing,
    )
