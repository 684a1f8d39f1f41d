"""How every loss here becomes a scalar: a masked sum over an explicit normalizer, or stays terms.

Axes: B sequences (any number of leading axes), T tokens, V vocabulary.

A normalizer counts what the whole optimizer step averages over, not what this call sees, so
that the losses of microbatches and of ranks add up to the loss of the batch. Nothing here
counts for the caller or takes a mean.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Number = int | float
Reduction = Literal["sum", "none"]
"""The sum over the normalizer, or a term for each token or pair that nothing has divided."""


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay what they are."""
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(
    values: Float[Tensor, "*B"], mask: Bool[Tensor, "*B"], normalizer: Number
) -> Float[Tensor, ""]:
    """Sum of the values under the mask, divided by the normalizer; 0 for an empty mask."""
    return normalized_sum(torch.where(mask, values, 0.0), normalizer)


def normalized_sum(values: Float[Tensor, "*B"], normalizer: Number) -> Float[Tensor, ""]:
    """Sum divided by the normalizer; a normalizer of 0 is the honest count of nothing."""
    if not math.isfinite(normalizer) or normalizer < 0:
        raise ValueError(
            f"normalizer is {normalizer} but has to be a finite count >= 0: pass the number of"
            " tokens, sequences or pairs in the whole optimizer step"
        )
    return values.sum() / (normalizer if normalizer > 0 else 1)


def reduce_terms(
    terms: Float[Tensor, "*B"], normalizer: Number | None, reduction: Reduction
) -> Float[Tensor, "..."]:
    """The terms' sum over the normalizer, or the terms as they are for "none"."""
    if reduction == "none":
        return terms
    if reduction != "sum":
        raise ValueError(f"reduction is {reduction!r}: use 'sum' or 'none'")
    if normalizer is None:
        raise ValueError(
            "normalizer is None but reduction 'sum' divides by it: pass the number of tokens,"
            " sequences or pairs in the whole optimizer step, or reduction='none'"
        )
    return normalized_sum(terms, normalizer)


def reduce_selected(
    terms: Float[Tensor, "N"],
    mask: Bool[Tensor, "*B T"],
    normalizer: Number | None,
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """`reduce_terms` of the terms of masked tokens; "none" is 0 where the mask is not."""
    if reduction == "none":
        return unselected(terms, mask)
    return reduce_terms(terms, normalizer, reduction)


def unselected(terms: Float[Tensor, "N"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """The terms of masked tokens at their places, 0 elsewhere."""
    return terms.new_zeros(mask.shape).masked_scatter(mask, terms)
