"""Cases that repeat a claim: `make test` tries the first ones, `make test-all` all of them.

The mark `long` leaves a test, or a case of one, out of the suite `core`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

LONG = pytest.mark.long


def repeated(values: Iterable[Any], first: int = 1) -> list[Any]:
    """Values of a parameter, such as seeds, of which the core has the first ones."""
    return [
        pytest.param(value, marks=[LONG] * (place >= first)) for place, value in enumerate(values)
    ]


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of several parameters; the core has each value of each parameter once."""
    rounds = range(max(map(len, axes)))
    core = {tuple(turn % len(axis) for axis in axes) for turn in rounds}
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, place, strict=True)),
            marks=[LONG] * (place not in core),
        )
        for place in places
    ]
