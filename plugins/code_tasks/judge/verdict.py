"""The verdict on an agent's work, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Basis = Literal["values", "values_and_tests", "tests"]
"""What the verdict rests on: hidden values of all deleted functions, of some, or of none."""


@dataclass(frozen=True)
class Verdict:
    """What a judge found: whether the work is right, and the share of visible tests it passes.

    `tests` is 0 where the reports of the tests contradict themselves. `flags` counts what the
    monitor and the boxes saw, by kind. `agreeing` hidden cases of all `cases` have the right value;
    None where they were not asked for, because the tests had failed. `refused` are paths of edits
    that were not taken.
    """

    solved: bool
    tests: float
    basis: Basis
    passed: int
    failed: tuple[str, ...] = ()
    agreeing: int | None = None
    cases: int = 0
    flags: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
