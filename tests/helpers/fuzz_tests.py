"""Seeded fuzzing of everything that reads what a stranger wrote; `nox -s fuzz` runs it longer.

Every case is made from a seed, and a failure names the seed that repeats it. A test asks `cases(n)`
for its seeds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from surroundings import as_before, forget_surroundings  # noqa: F401

forget_surroundings()
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "unit" / "helpers"))
sys.path.insert(0, str(TESTS / "fuzz" / "helpers"))
sys.path.extend(map(str, TESTS.glob("plugins/*/helpers")))

FACTOR = "COMPOSER_MESH_FUZZ_FACTOR"
FIRST_SEED = "COMPOSER_MESH_FUZZ_SEED"


@pytest.fixture(scope="session")
def cases() -> Callable[[int], Iterator[int]]:
    """Seeds of `n` cases, times the factor that `nox -s fuzz` sets."""
    factor, first = int(os.environ.get(FACTOR, "1")), int(os.environ.get(FIRST_SEED, "0"))

    def seeds(n: int) -> Iterator[int]:
        return iter(range(first, first + n * factor))

    return seeds
