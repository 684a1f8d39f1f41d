"""The policy loss of a config section, on the log-probs of a microbatch.

Maps each loss type to its function in `losses.policy`, and chooses the log-probs that its ratio is
relative to.

Axes: B sequences of a microbatch, T their padded length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from composer_mesh.configs import losses as configs
from composer_mesh.losses.policy import (
    PolicyLoss,
    Rejection,
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    gmpo_loss,
    grpo_loss,
    off_policy_weights,
    prime_rl_ipo_loss,
    prime_rl_loss,
    reinforce_loss,
    sampling_weights,
    sapo_loss,
    vespo_loss,
)

Loss = Callable[..., PolicyLoss]
RatioLoss = (
    configs.GrpoLoss | configs.CispoLoss | configs.SapoLoss | configs.GmpoLoss | configs.VespoLoss
)
"""Losses on a ratio, which is relative to the trainer's own log-probs if a correction applies."""
RATIO_LOSSES: dict[str, Loss] = {
    "grpo": grpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "vespo": vespo_loss,
}
OF_THE_CHANNEL = {"type", "entropy_coef", "off_policy_threshold", "top_entropy_quantile"}
OF_THE_CHANNEL |= {"correction", "correction_maximum", "correction_minimum"}
"""Config keys that are not keyword arguments of the loss function."""
Corrected = RatioLoss | configs.ReinforceLoss
"""Losses whose terms may be weighted by the trainer / generator ratio."""


@dataclass(frozen=True)
class Tokens:
    """Per-token tensors of a microbatch; position t is about the id at t + 1.

    All are [B, T - 1] except advantages, which are [B] if no sequence has one for each token.
    `current` is True at ids sampled by the version that is being trained; `start` are the trainer's
    own log-probs before the step's first update, without a gradient. `chosen` is 0 at tokens that
    have no policy gradient, else 1; None if all have one.
    """

    logprobs: Tensor
    start: Tensor
    sampling: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor
    current: Tensor
    chosen: Tensor | None


def policy_loss(
    loss: configs.LossConfig, tokens: Tokens, normalizer: int, weights: Tensor | None
) -> PolicyLoss:
    """Compute the loss of a config section, with the given correction weights."""
    now, then, advantages, mask = tokens.logprobs, tokens.sampling, tokens.advantages, tokens.mask
    options = _options(loss) | {"normalizer": normalizer}
    match loss:
        case configs.GrpoLoss() | configs.CispoLoss() | configs.SapoLoss():
            options |= {"reference_logprobs": tokens.reference}
            return _ratio_loss(loss, tokens, options, weights, loss.off_policy_threshold)
        case configs.GmpoLoss() | configs.VespoLoss():
            return _ratio_loss(loss, tokens, options, weights)
        case configs.PrimeRlLoss():
            return prime_rl_loss(
                now, then, advantages, mask, reference_logprobs=tokens.reference, **options
            )
        case configs.PrimeRlIpoLoss():
            return prime_rl_ipo_loss(now, then, advantages, mask, **options)
        case configs.DppoLoss():
            return dppo_loss(now, then, advantages, mask, **options)
        case configs.DecoupledPpoLoss():
            # The proximal policy is that of the step's start.
            options |= {"rejection": Rejection(**loss.rejection.model_dump())}
            return decoupled_ppo_loss(now, tokens.start, then, advantages, mask, **options)
        case configs.ReinforceLoss():
            weights = _product(weights, tokens.chosen)
            return reinforce_loss(now, advantages, mask, sampling_weights=weights, **options)
    raise AssertionError(f"the config has a loss that nobody computes: {loss.type}")


def correction_weights(
    loss: configs.LossConfig, tokens: Tokens, *, bounded: bool = True
) -> Tensor | None:
    """Return trainer / generator weights [B, T - 1]; None where a loss has no correction."""
    if not isinstance(loss, Corrected) or loss.correction == "none":
        return None
    return sampling_weights(
        tokens.start,
        tokens.sampling,
        tokens.mask,
        mode=loss.correction,
        maximum=loss.correction_maximum if bounded else None,
        minimum=loss.correction_minimum if bounded else None,
    )


def _ratio_loss(
    loss: RatioLoss,
    tokens: Tokens,
    options: dict[str, Any],
    weights: Tensor | None,
    off_policy_threshold: float | None = None,
) -> PolicyLoss:
    old = tokens.sampling if weights is None else tokens.start
    if off_policy_threshold is not None:
        kept = off_policy_weights(
            tokens.logprobs,
            tokens.sampling,
            tokens.advantages,
            tokens.mask,
            threshold=off_policy_threshold,
        )
        weights = _product(weights, kept)
    weights = _product(weights, tokens.chosen)
    return RATIO_LOSSES[loss.type](
        tokens.logprobs,
        old,
        tokens.advantages,
        tokens.mask,
        sampling_weights=weights,
        **options,
    )


def _product(weights: Tensor | None, others: Tensor | None) -> Tensor | None:
    """Return the product of weights of tokens, where None are ones."""
    if weights is None or others is None:
        return others if weights is None else weights
    return weights * others


def _options(loss: configs.LossConfig) -> dict[str, Any]:
    """Return the section's keys that are keyword arguments of the loss function."""
    return loss.model_dump(exclude=OF_THE_CHANNEL)
