"""The losses that clients of the Tinker protocol name: terms of each target token.

Axes: B sequences (any number of leading axes, also none), T tokens, K targets of a token.

Position t of every tensor is the same target token. A loss is the plain sum of its terms, without a
normalizer: clients scale advantages and weights themselves. Terms outside of the mask are 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.logprobs import importance_ratio, masked_log_ratio, selected
from composer_mesh.plugins.tinker import client_channels

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""Bounds of the ratio where a client names none."""
BETA = 0.05
"""Weight of `dro`'s penalty where a client names none."""
CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]
Channels = Callable[[Tensor, Inputs, Options, Tensor], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class ClientLoss:
    """A loss by name: its terms, and the inputs and options that it takes."""

    terms: Callable[[Tensor, Inputs, Options, Tensor], Tensor] | None
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    several_targets: bool = False
    channels: Channels | None = None
    """In place of terms: the total of all sequences, and losses that are reported by name."""
    has_pairs: bool = False
    """Whether sequences whose `preference` is above 0 belong together with the one after them."""

    def total(
        self, logprobs: Tensor, inputs: Inputs, options: Options, mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of some sequences, and those of its channels by name."""
        if self.channels is not None:
            return self.channels(logprobs, inputs, options, mask)
        assert self.terms is not None
        return self.terms(logprobs, inputs, options, mask).sum(), {}


def cross_entropy(
    logprobs: Float[Tensor, "*T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*T"]
) -> Float[Tensor, "*T"]:
    """Weighted negative log-likelihood, -weights * logprobs; of one or of K targets of a token.

    With the weights -dC/dlogprobs this backpropagates any loss C that a client computed itself.
    Weights of 1 where there are none.
    """
    del options
    weights = inputs["weights"] if "weights" in inputs else torch.ones_like(logprobs)
    return -torch.where(mask & (weights != 0), logprobs * weights, 0.0)


def importance_sampling(
    logprobs: Float[Tensor, "*B T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """Policy gradient with the ratio to the sampler's policy, unclipped: -ratio * A."""
    del options
    return -_ratio(logprobs, inputs, mask) * inputs["advantages"]


def ppo(
    logprobs: Float[Tensor, "*B T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with bounds of the ratio itself."""
    return _surrogate(_ratio(logprobs, inputs, mask), inputs, options)


def cispo(
    logprobs: Float[Tensor, "*B T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """CISPO (arXiv 2506.13585, eq. 4): the clipped ratio as a constant weight of each log-prob."""
    weight = _clipped(_ratio(logprobs.detach(), inputs, mask), inputs, options)
    return -weight * inputs["advantages"] * selected(logprobs, mask)


def gspo(
    logprobs: Float[Tensor, "*B T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """GSPO-token (arXiv 2507.18071, eq. 13): PPO's surrogate with the ratio of the sequence.

    The ratio is the geometric mean over the tokens whose advantage is not 0.
    """
    own = mask & (inputs["advantages"] != 0)
    log_ratio = masked_log_ratio(logprobs, inputs["logprobs"], own)
    return _surrogate(importance_ratio(log_ratio, own, "sequence_token"), inputs, options)


def dro(
    logprobs: Float[Tensor, "*B T"], inputs: Inputs, options: Options, mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """DRO (arXiv 2405.19107): -(A * logprobs - beta / 2 * log-ratio squared)."""
    log_ratio = masked_log_ratio(logprobs, inputs["logprobs"], mask)
    gain = inputs["advantages"] * selected(logprobs, mask)
    return -(gain - options.get("beta", BETA) / 2 * log_ratio.square())


def _ratio(logprobs: Tensor, inputs: Inputs, mask: Tensor) -> Tensor:
    return importance_ratio(masked_log_ratio(logprobs, inputs["logprobs"], mask), mask, "token")


def _surrogate(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, options) * advantages)


def _clipped(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    low: Tensor | float = options.get("clip_low_threshold", CLIP_LOW)
    high: Tensor | float = options.get("clip_high_threshold", CLIP_HIGH)
    low, high = inputs.get("clip_low_threshold", low), inputs.get("clip_high_threshold", high)
    one = ratio.new_ones(())
    return ratio.clamp(low * one, high * one)


_SAMPLED = frozenset({"logprobs", "advantages"})

CLIENT_LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(
        cross_entropy, frozenset(), frozenset({"weights"}), several_targets=True
    ),
    "importance_sampling": ClientLoss(importance_sampling, _SAMPLED),
    "ppo": ClientLoss(ppo, _SAMPLED, CLIPS, CLIPS),
    "cispo": ClientLoss(cispo, _SAMPLED, CLIPS, CLIPS),
    "gspo": ClientLoss(gspo, _SAMPLED, CLIPS, CLIPS),
    "dro": ClientLoss(dro, _SAMPLED, frozenset(), frozenset({"beta"})),
    "three_channel": ClientLoss(
        None,
        client_channels.INPUTS,
        frozenset(),
        client_channels.OPTIONS,
        several_targets=True,
        channels=client_channels.three_channel,
        has_pairs=True,
    ),
}
"""What clients may name. Each also takes `target_tokens`."""
