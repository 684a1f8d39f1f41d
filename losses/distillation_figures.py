"""Entropies of student and teacher at the distilled tokens: metrics without gradient.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.checks import check_temperature
from composer_mesh.losses.jsd import row_logprobs
from composer_mesh.losses.opd import entropy
from composer_mesh.losses.reductions import Number, Reduction, reduce_selected


@dataclass(frozen=True)
class DistillationFigures:
    """Entropies in nats, summed over the normalizer as the losses are; detached."""

    student_entropy: Float[Tensor, "..."]
    teacher_entropy: Float[Tensor, "..."]


@torch.no_grad()
def distillation_figures(
    student: Float[Tensor, "*B T V"],
    teacher: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> DistillationFigures:
    """Entropies of both sides' rows, from logits or log-probs, at the temperature of the loss.

    With the token count of the step as normalizer they add up to the mean over its tokens; with
    `reduction="none"` they are those of each token [*B T], 0 under no mask.
    """
    check_temperature(temperature)
    both = (entropy(row_logprobs(rows[mask], temperature)) for rows in (student, teacher))
    found = [reduce_selected(entropies, mask, normalizer, reduction) for entropies in both]
    return DistillationFigures(*found)
