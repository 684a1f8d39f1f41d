"""The three-channel step as one loss of the Tinker protocol: `three_channel`.

    total = policy + alpha * sdpo + beta * replay

Axes: B sequences, T tokens, C = 1 + K targets of a token: its next id, then K ids of a teacher.

What a position trains follows from its inputs, all [B, T, C], or [B, T] where no sequence has ids
of a teacher:

                     column 0                                        columns 1 to K
    logprobs         of the sampler; in pairs, of the reference      of the teacher
    advantages       of the policy loss                              unread
    weights          of the policy loss, 0 where it trains nothing   of the row's divergence, or 0
    preference       pairs: w at answers preferred, -w at rejected   unread

A pair is two sequences, the preferred one first, and w its weight. Weights hold the normalizers:
callers divide by the counts of their whole step, as no request knows the others of its step.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.channels.step import POLICY, Term, own_weights, step_loss
from composer_mesh.losses.distillation import topk_distillation
from composer_mesh.losses.policy import grpo_loss
from composer_mesh.losses.preference import dpo_loss

CLIP_LOW, CLIP_HIGH = 0.8, 1.28
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
        clip_low=1 - options.get("clip_low_threshold", CLIP_LOW),
        clip_high=options.get("clip_high_threshold", CLIP_HIGH) - 1,
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
