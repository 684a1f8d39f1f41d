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
from composer_mesh.configs.losses import CorrectedLoss, RatioLoss
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

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "grpo": grpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "vespo": vespo_loss,
    "prime_rl": prime_rl_loss,
    "prime_rl_ipo": prime_rl_ipo_loss,
    "dppo": dppo_loss,
}
"""Losses on the ratio of the policy to an older one."""
OF_THE_CHANNEL = {"type", "entropy_coef", "off_policy_threshold", "top_entropy_quantile"}
OF_THE_CHANNEL |= {"correction", "correction_maximum", "correction_minimum"}
"""Config keys that are not keyword arguments of the loss function."""


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
    """Compute the loss of a config section, with the given correction weights.

    A ratio is relative to the trainer's own log-probs if a correction applies.
    """
    now, old, rest = tokens.logprobs, tokens.sampling, (tokens.advantages, tokens.mask)
    options: dict[str, Any] = loss.model_dump(exclude=OF_THE_CHANNEL) | {"normalizer": normalizer}
    if isinstance(loss, CorrectedLoss):
        old = tokens.sampling if weights is None else tokens.start
        if isinstance(loss, RatioLoss) and (threshold := loss.off_policy_threshold) is not None:
            kept = off_policy_weights(now, tokens.sampling, *rest, threshold=threshold)
            weights = _product(weights, kept)
        options["sampling_weights"] = _product(weights, tokens.chosen)
    if isinstance(loss, RatioLoss | configs.PrimeRlLoss):
        options["reference_logprobs"] = tokens.reference
    if isinstance(loss, configs.ReinforceLoss):
        return reinforce_loss(now, *rest, **options)
    if isinstance(loss, configs.DecoupledPpoLoss):
        # The proximal policy is that of the step's start.
        options["rejection"] = Rejection(**loss.rejection.model_dump())
        return decoupled_ppo_loss(now, tokens.start, old, *rest, **options)
    return LOSSES[loss.type](now, old, *rest, **options)


def correction_weights(
    loss: configs.LossConfig, tokens: Tokens, *, bounded: bool = True
) -> Tensor | None:
    """Return trainer / generator weights [B, T - 1]; None where a loss has no correction."""
    if not isinstance(loss, CorrectedLoss) or loss.correction == "none":
        return None
    return sampling_weights(
        tokens.start,
        tokens.sampling,
        tokens.mask,
        mode=loss.correction,
        maximum=loss.correction_maximum if bounded else None,
        minimum=loss.correction_minimum if bounded else None,
    )


def _product(weights: Tensor | None, others: Tensor | None) -> Tensor | None:
    """Return the product of weights of tokens, where None are ones."""
    if weights is None or others is None:
        return others if weights is None else weights
    return weights * others
