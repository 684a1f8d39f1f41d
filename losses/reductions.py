"""Reduction of every loss to a scalar: a masked sum over an explicit normalizer, or no reduction.

Axes: B sequences (any number of leading axes), T tokens, V vocabulary.

A normalizer counts what the whole optimizer step averages over, not only this call's tokens, so
that the losses of microbatches and of ranks add up to the loss of the batch. Callers count; no
means are taken here.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Number = int | float
Reduction = Literal["sum", "none"]
"""The sum over the normalizer, or one undivided term per token or pair."""


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32; float32 and float64 stay unchanged."""
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(
    values: Float[Tensor, "*B"], mask: Bool[Tensor, "*B"], normalizer: Number
) -> Float[Tensor, ""]:
    """Sum of the values under the mask, divided by the normalizer; 0 for an empty mask."""
    return normalized_sum(torch.where(mask, values, 0.0), normalizer)


def normalized_sum(values: Float[Tensor, "*B"], normalizer: Number) -> Float[Tensor, ""]:
    """Sum divided by the normalizer; a normalizer of 0 is allowed if there is nothing to sum."""
    if not math.isfinite(normalizer) or normalizer < 0:
        raise ValueError(
            f"normalizer is {normalizer} but must be a finite count >= 0: pass the number of"
            " tokens, sequences or pairs in the whole optimizer step"
        )
    return values.sum() / (normalizer if normalizer > 0 else 1)


def reduce_terms(
    terms: Float[Tensor, "*B"], normalizer: Number | None, reduction: Reduction
) -> Float[Tensor, "..."]:
    """Return the terms' sum over the normalizer, or for "none" the terms unchanged."""
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
    """Apply `reduce_terms` to the terms of masked tokens; "none" gives 0 outside of the mask."""
    if reduction == "none":
        return unselected(terms, mask)
    return reduce_terms(terms, normalizer, reduction)


def unselected(terms: Float[Tensor, "N"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Scatter the terms of masked tokens to their positions, with 0 elsewhere."""
    return terms.new_zeros(mask.shape).masked_scatter(mask, terms)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        others = ", ".join(repr(choice) for choice in choices[:-1])
        raise ValueError(f"{name} is {value!r}: use {others} or {choices[-1]!r}")


def check_positive(name: str, value: Number | None, repair: str) -> None:
    """Raise unless the value is above 0 or None."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} is {value} but must be > 0: {repair}")


def check_not_negative(name: str, value: Number | None, repair: str) -> None:
    """Raise for a value below 0 or NaN, but not for None."""
    if value is not None and not value >= 0:
        raise ValueError(f"{name} is {value} but must be >= 0: {repair}")


def check_fraction(name: str, value: Number, repair: str) -> None:
    """Raise unless the value is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value} but must be in [0, 1]: {repair}")


def check_clip(low: Number, high: Number) -> None:
    """Raise unless the clip range [1 - low, 1 + high] contains 1 and no negative ratios."""
    check_fraction("clip_low", low, "use 0.2, or 1 for no lower clip")
    check_not_negative("clip_high", high, "use 0.2, or inf for no upper clip")


def check_temperature(value: Number) -> None:
    """Raise for a temperature that logits cannot be divided by."""
    check_positive("temperature", value, "use 1.0 to switch it off")


def check_jsd_beta(value: Number) -> None:
    """Raise for a mixture weight of student and teacher outside [0, 1]."""
    check_fraction("jsd_beta", value, "0 is forward KL, 1 is reverse KL")


def check_top_k(value: int) -> None:
    """Raise unless at least one entry of a row is kept."""
    if not value >= 1:
        raise ValueError(
            f"top_k is {value} but must be >= 1: use 100, or None for the whole vocabulary"
        )
