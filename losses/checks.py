"""Argument checks of the losses: errors with the value, its bound and the repair.

Only numbers and names are checked here; shapes are in the signatures.
"""

from collections.abc import Sequence

from composer_mesh.losses.reductions import Number


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        others = ", ".join(repr(choice) for choice in choices[:-1])
        raise ValueError(f"{name} is {value!r}: use {others} or {choices[-1]!r}")


def check_positive(name: str, value: Number | None, repair: str) -> None:
    """Raise unless the value is above 0 or None."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} is {value} but has to be > 0: {repair}")


def check_not_negative(name: str, value: Number | None, repair: str) -> None:
    """Raise for a value below 0 or NaN, but not for None."""
    if value is not None and not value >= 0:
        raise ValueError(f"{name} is {value} but has to be >= 0: {repair}")


def check_clip(low: Number, high: Number) -> None:
    """Raise unless the clip range [1 - low, 1 + high] contains 1 and no negative ratios."""
    if not 0 <= low <= 1:
        raise ValueError(
            f"clip_low is {low} but has to be in [0, 1]: use 0.2, or 1 for no lower clip"
        )
    check_not_negative("clip_high", high, "use 0.2, or inf for no upper clip")


def check_temperature(value: Number) -> None:
    """Raise for a temperature that logits cannot be divided by."""
    check_positive("temperature", value, "use 1.0 to switch it off")


def check_jsd_beta(value: Number) -> None:
    """Raise for a mixture weight of student and teacher outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(
            f"jsd_beta is {value} but has to be in [0, 1]: 0 is forward KL, 1 is reverse KL"
        )


def check_top_k(value: int) -> None:
    """Raise unless at least one entry of a row is kept."""
    if not value >= 1:
        raise ValueError(
            f"top_k is {value} but has to be >= 1: use 100, or None for the whole vocabulary"
        )
