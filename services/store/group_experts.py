"""The experts of a group's turns in its file: one array, and the shape of each turn's part."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from composer_mesh.rollouts.expert_choices import ExpertChoices
from composer_mesh.rollouts.traces import Trace

Shape = tuple[int, int, int]
"""Positions, layers, and experts of a token."""

EXPERTS = {"experts": ("uint8", "uint16")}
"""The array of groups whose turns have experts."""


def shapes_of(trace: Trace) -> list[Shape | None]:
    """Return positions, layers and experts of a token of each turn; empty if no turn has any."""
    found = [turn.experts for turn in trace.turns]
    if not any(found):
        return []
    return [None if one is None else (one.positions, one.layers, one.per_token) for one in found]


def experts_array(found: Sequence[ExpertChoices]) -> dict[str, NDArray[np.generic]]:
    """Return the array of all experts, none without any; raises ValueError for unlike widths."""
    if not found:
        return {}
    if len(widths := {one.width for one in found}) > 1:
        raise ValueError(f"experts of one group have {sorted(widths)} bytes: all are of one model")
    contents = b"".join(one.contents for one in found)
    return {"experts": np.frombuffer(contents, EXPERTS["experts"][widths.pop() - 1])}


class ExpertsReader:
    """The array of experts of a group's file, of which each turn takes what it states."""

    def __init__(self, array: NDArray[np.generic] | None) -> None:
        self._width = 0 if array is None else array.itemsize
        self._left = b"" if array is None else array.tobytes()
        self._at = 0

    def take(self, shape: Shape | None) -> ExpertChoices | None:
        """Return the next experts, of so many positions, layers and experts of a token."""
        if shape is None:
            return None
        positions, layers, per_token = shape
        end = self._at + positions * layers * per_token * self._width
        if min(shape) < 0 or not self._at <= end <= len(self._left):
            raise ValueError(f"experts of {positions} positions are stated, which it has not")
        contents, self._at = self._left[self._at : end], end
        return ExpertChoices(layers, per_token, self._width, contents)

    def check_all_taken(self) -> None:
        """Raise ValueError if it has experts that no turn states."""
        if self._at != len(self._left):
            raise ValueError(f"experts have {len(self._left)} bytes, and {self._at} are stated")
