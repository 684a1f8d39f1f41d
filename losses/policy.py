"""Policy losses: clipped policy gradients on the tokens that the policy sampled.

Axes: B sequences or packed rows (any number of leading axes, also none), T tokens, V vocabulary.
Position t of every tensor speaks about the same token: nothing here shifts, packs, counts or
computes advantages.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.losses.reductions import Number, at_least_float32, masked_sum

# exp(80) is finite in float32 and exp(89) is not; an infinite ratio has a NaN gradient even where
# the clip discards it.
LOG_RATIO_LIMIT = 80.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what it saw; every figure is a masked sum over the loss' normalizer.

    With the token count of the step as normalizer the figures of microbatches add up to the
    means of the batch. All but `loss` are detached.
    """

    loss: Float[Tensor, ""]
    clipped_fraction: Float[Tensor, ""]
    ratio_mean: Float[Tensor, ""]
    kl_k3: Float[Tensor, ""]


def token_logprobs(
    logits: Float[Tensor, "*B T V"], targets: Int[Tensor, "*B T"], temperature: Number = 1.0
) -> Float[Tensor, "*B T"]:
    """Log-probability of each target under `softmax(logits / temperature)`, in nats.

    Aligned: `logits[..., t, :]` is the prediction of `targets[..., t]`; the caller has shifted.
    A target under no mask must still be an id below V.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature} but has to be > 0: use 1.0 to switch it off"
        )
    scores = at_least_float32(logits) / temperature
    chosen = scores.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return chosen - scores.logsumexp(-1)


def grpo_loss(
    logprobs: Float[Tensor, "*B T"],
    behaviour_logprobs: Float[Tensor, "*B T"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "*B T"],
    *,
    normalizer: Number,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    ratio_cap: Number | None = None,
) -> PolicyLoss:
    """Clipped surrogate of GRPO (arXiv 2402.03300) with DAPO's aggregation (arXiv 2503.14476).

        r    = exp(logprobs - behaviour_logprobs)
        l    = -min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)
        loss = sum of l over the masked tokens / normalizer

    `advantages` is one number per sequence [*B] or per token [*B T]; behaviour log-probs and
    advantages get no gradient. `normalizer` is the token count of the whole step (TRL's loss type
    `dapo`); dividing by a constant instead gives `dr_grpo`. `ratio_cap` is TRL's `delta`: it bounds
    only the unclipped branch, which otherwise grows without limit where A < 0.

    `clipped_fraction` counts tokens on which the clip binds, `kl_k3` estimates
    KL(behaviour || policy) by r - 1 - log r: the mismatch between sampling and training.

    Differs from TRL: an empty mask gives figures of 0, not NaN; what stands under no mask may be
    NaN; log-ratios beyond +-80 count as +-80.
    """
    _check_clip(clip_low, clip_high, ratio_cap)
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, mask)
    advantage = torch.where(mask, _per_token(advantages, logprobs), 0.0)
    ratio = log_ratio.exp()
    unclipped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(unclipped * advantage, clipped * advantage)

    fixed = ratio.detach()
    binds = ((fixed > 1 + clip_high) & (advantage > 0)) | ((fixed < 1 - clip_low) & (advantage < 0))
    k3 = torch.expm1(log_ratio.detach()) - log_ratio.detach()
    return PolicyLoss(
        loss=masked_sum(per_token, mask, normalizer),
        clipped_fraction=masked_sum(binds.to(fixed.dtype), mask, normalizer),
        ratio_mean=masked_sum(fixed, mask, normalizer),
        kl_k3=masked_sum(k3, mask, normalizer),
    )


def _log_ratio(
    logprobs: Float[Tensor, "*B T"],
    behaviour_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B T"]:
    # Selected before the subtraction: a NaN below the mask would reach the gradient through exp.
    policy = torch.where(mask, at_least_float32(logprobs), 0.0)
    behaviour = torch.where(mask, at_least_float32(behaviour_logprobs.detach()), 0.0)
    return (policy - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _per_token(advantages: Tensor, logprobs: Float[Tensor, "*B T"]) -> Tensor:
    """Advantages broadcast over the tokens of their sequence, detached."""
    advantages = at_least_float32(advantages.detach())
    if advantages.shape == logprobs.shape:
        return advantages
    if advantages.shape == logprobs.shape[:-1]:
        return advantages.unsqueeze(-1)
    raise ValueError(
        f"advantages have shape {tuple(advantages.shape)} but log-probs {tuple(logprobs.shape)}:"
        " pass one advantage per sequence or one per token"
    )


def _check_clip(low: Number, high: Number, cap: Number | None) -> None:
    if not 0 <= low <= 1:
        raise ValueError(
            f"clip_low is {low} but has to be in [0, 1]: use 0.2, or 1 for no lower clip"
        )
    if not high >= 0:
        raise ValueError(
            f"clip_high is {high} but has to be >= 0: use 0.2, or inf for no upper clip"
        )
    if cap is not None and not cap > 0:
        raise ValueError(
            f"ratio_cap is {cap} but has to be > 0: use a value above 1 + clip_high, or None"
        )
