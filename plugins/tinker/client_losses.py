"""The losses that clients of the Tinker protocol name: terms of each target token.

Axes: B sequences (any number of leading axes, also none), T tokens, K targets of a token.

Position t of every tensor is the same target token. A loss is the plain sum of its terms, without a
normalizer: clients scale advantages and weights themselves. Terms outside of the mask are 0.

`three_channel` is the three-channel step as one loss: policy + alpha * sdpo + beta * replay. What a
position trains follows from its inputs, all [B, T, C], or [B, T] where no sequence has ids of a
teacher; C = 1 + K targets of a token: its next id, then K ids of a teacher.

                     column 0                                        columns 1 to K
    logprobs         of the sampler; in pairs, of the reference      of the teacher
    advantages       of the policy loss                              unread
    weights          of the policy loss, 0 where it trains nothing   of the row's divergence, or 0
    preference       pairs: w at answers preferred, -w at rejected   unread

A pair is two sequences, the preferred one first, and w its weight. Weights hold the normalizers:
callers divide by the counts of their whole step, as no request knows the others of its step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.channels.step import POLICY, Term, own_weights, step_loss
from composer_mesh.losses.distillation import topk_distillation
from composer_mesh.losses.logprobs import importance_ratio, masked_log_ratio, selected
from composer_mesh.losses.policy import grpo_loss
from composer_mesh.losses.preference import dpo_loss

CHANNEL_CLIP_LOW, CHANNEL_CLIP_HIGH = 0.8, 1.28
"""Bounds of the ratio where a client names none: those of [loss] in a config."""
JSD_BETA, DPO_BETA = 0.5, 0.1
NO_MASS = -100.0
"""Log-prob of a column without an id, on both sides."""

OPTIONS = frozenset(
    {"alpha", "beta", "jsd_beta", "dpo_beta", "clip_low_threshold", "clip_high_threshold"}
)
INPUTS = frozenset({"logprobs", "advantages", "weights", "preference"})


def three_channel(
    logprobs: Float[Tensor, "B T ..."],
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
    mask: Bool[Tensor, "B T ..."],
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return the total and each channel's own loss, for those that are on and have data."""
    if logprobs.ndim == 2:
        logprobs, mask = logprobs[..., None], mask[..., None]
        inputs = {name: values[..., None] for name, values in inputs.items()}
    weights = own_weights(options.get("alpha", 1.0), options.get("beta", 1.0))
    terms: dict[str, Term] = {
        name: partial(term, logprobs, inputs, options, mask)
        for name, term in ((POLICY, _policy), ("sdpo", _sdpo), ("replay", _replay))
        if weights[name]
    }
    found = step_loss(terms, weights)
    return found.total(), found.losses


def _policy(
    logprobs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float], mask: Tensor
) -> Tensor | None:
    weights = inputs["weights"][..., 0]
    trained = mask[..., 0] & (weights != 0)
    if not trained.any():
        return None
    found = grpo_loss(
        logprobs[..., 0],
        inputs["logprobs"][..., 0],
        inputs["advantages"][..., 0],
        trained,
        clip_low=1 - options.get("clip_low_threshold", CHANNEL_CLIP_LOW),
        clip_high=options.get("clip_high_threshold", CHANNEL_CLIP_HIGH) - 1,
        reduction="none",
    )
    return (found.loss * weights).sum()


def _sdpo(
    logprobs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float], mask: Tensor
) -> Tensor | None:
    weights = torch.where(mask[..., 1:], inputs["weights"][..., 1:], 0.0)
    if not weights.any():
        return None
    beta = options.get("jsd_beta", JSD_BETA)
    return divergence(logprobs[..., 1:], inputs["logprobs"][..., 1:], weights, beta)


def divergence(
    student: Float[Tensor, "*B T K"],
    teacher: Float[Tensor, "*B T K"],
    weights: Float[Tensor, "*B T K"],
    jsd_beta: float,
) -> Float[Tensor, ""]:
    """Return the weighted sum of SDPO's divergences of rows, on K ids and the rest of each.

    Where a weight is 0 there is no id; all others of a row are equal.
    """
    kept = weights != 0
    rows = kept.any(-1)
    terms = topk_distillation(
        torch.where(kept, student, NO_MASS),
        torch.where(kept, teacher, NO_MASS),
        rows,
        jsd_beta=jsd_beta,
        reduction="none",
    )
    return (terms * weights.amax(-1)).sum()


def _replay(
    logprobs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float], mask: Tensor
) -> Tensor | None:
    preference = torch.where(mask[..., 0], inputs["preference"][..., 0], 0.0)
    preferred = (preference > 0).any(-1).nonzero()[:, 0]
    if not len(preferred):
        return None
    answers = preference != 0

    def sums(values: Tensor, rows: Tensor) -> Tensor:
        return torch.where(answers, values[..., 0], 0.0)[rows].sum(-1)

    found = dpo_loss(
        sums(logprobs, preferred),
        sums(logprobs, preferred + 1),
        sums(inputs["logprobs"], preferred),
        sums(inputs["logprobs"], preferred + 1),
        beta=options.get("dpo_beta", DPO_BETA),
        weights=preference[preferred].amax(-1),
        normalizer=1,
    )
    return found.loss


def side_of(preference: Any) -> int:
    """Return 1 for a preferred answer, -1 for a rejected one, 0 for a sequence of no pair.

    `preference` is an array [T] or [T, C]. Raises ValueError where it has both signs.
    """
    own = preference if preference.ndim == 1 else preference[:, 0]
    above, below = bool((own > 0).any()), bool((own < 0).any())
    if above and below:
        raise ValueError(
            "preference has values above and below 0: a sequence is one side of a pair"
        )
    return int(above) - int(below)


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
        INPUTS,
        frozenset(),
        OPTIONS,
        several_targets=True,
        channels=three_channel,
        has_pairs=True,
    ),
}
"""What clients may name. Each also takes `target_tokens`."""
