"""The policy channel: traces with their advantages as samples, and the loss on them.

The loss of a config section maps its type to the function in `losses.policy`, and chooses the
log-probs that its ratio is relative to.

Axes: B sequences of a microbatch, T their padded length.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
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
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import Advantage, ChannelSample, PolicySample, Skipped
from composer_mesh.rollouts.traces import Trace

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


def policy_sample(trace: Trace, advantage: Advantage) -> PolicySample:
    """Convert a trace to a sample; ids that were not sampled get log-prob 0 and version -1.

    A list has the advantage of each turn, which all of its trained ids get.
    """
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trace.turns:
        trained = turn.trained
        logprobs += [0.0] * len(turn.context_ids)
        logprobs += turn.logprobs if trained else [0.0] * len(turn.action_ids)
        versions += [-1] * len(turn.context_ids)
        versions += turn.versions if trained else [-1] * len(turn.action_ids)
    return PolicySample(
        trace.trace_id,
        trace.token_ids(),
        trace.action_mask(),
        logprobs,
        _by_id(trace, advantage) if isinstance(advantage, list) else advantage,
        versions,
        trace.group_id,
        trace.expert_choices(),
    )


def _by_id(trace: Trace, advantages: Sequence[float]) -> list[float]:
    """Return the advantage of each id from those of the turns; 0 where none is trained."""
    runs = (
        chain(repeat(0.0, len(turn.context_ids)), repeat(own * turn.trained, len(turn.action_ids)))
        for turn, own in zip(trace.turns, advantages, strict=True)
    )
    return list(chain.from_iterable(runs))


def without_aged(sample: PolicySample, oldest: int) -> PolicySample:
    """Return a sample in which tokens of versions before `oldest` are context only.

    Without a trained token its advantage is 0.
    """
    mask = [
        on and version >= oldest for on, version in zip(sample.mask, sample.versions, strict=True)
    ]
    if mask == sample.mask:
        return sample
    logprobs = [one * on for one, on in zip(sample.logprobs, mask, strict=True)]
    versions = [one if on else -1 for one, on in zip(sample.versions, mask, strict=True)]
    advantage = sample.advantage
    if isinstance(advantage, list):
        advantage = [one * on for one, on in zip(advantage, mask, strict=True)]
    elif not any(mask):
        advantage = 0.0
    return replace(sample, mask=mask, logprobs=logprobs, versions=versions, advantage=advantage)


def without_zero_advantages(
    samples: Sequence[PolicySample], others: Iterable[HintedView | ChannelSample]
) -> tuple[list[PolicySample], Skipped]:
    """Leave out the samples with advantage 0 that no other belongs to, and count them."""
    trained = {one.trace_id for one in others}
    skipped = [one for one in samples if one.is_zero and one.trace_id not in trained]
    kept = [one for one in samples if not one.is_zero or one.trace_id in trained]
    return kept, Skipped(len(skipped), sum(sum(sample.mask) for sample in skipped))
