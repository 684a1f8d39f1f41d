"""Quick pickles of the messages of rollout workers, of which there are thousands a second.

Ids and log-probs travel as the bytes of arrays; versions, nearly always equal, as runs. A frozen
dataclass with slots searches its fields each time that it is pickled, unless it says how.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

IDS, LOGPROBS = "i", "d"
"""Type codes of `array`: int32 for token ids, float64 for log-probs."""


def pickled_by_position(cls: type[T]) -> type[T]:
    """Pickle a dataclass of two or more fields as its class and their values."""
    values = attrgetter(*(one.name for one in fields(cls)))  # type: ignore[arg-type]

    def __reduce__(self: T) -> Any:
        return cls, values(self)

    cls.__reduce__ = __reduce__  # type: ignore[method-assign, assignment]
    return cls


def packed(code: str, values: Sequence[float]) -> bytes:
    """Return numbers as bytes; raises OverflowError for an id of more than 32 bits."""
    return array(code, values).tobytes()


def unpacked(code: str, contents: bytes) -> list[Any]:
    """Return the numbers that were packed."""
    values = array(code)
    values.frombytes(contents)
    return values.tolist()


def runs_of(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return values as pairs of a value and how often it follows itself."""
    if values and values.count(values[0]) == len(values):
        return [(values[0], len(values))]
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def values_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the values of runs, one after another."""
    values: list[int] = []
    for value, times in runs:
        values += [value] * times
    return values
