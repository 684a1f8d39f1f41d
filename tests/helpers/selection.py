"""Which suite a test file is of, by the table in selection.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
Suites = Mapping[str, list[str]]


@cache
def suites() -> Suites:
    """Paths below tests/ by suite."""
    found: Suites = tomllib.loads((TESTS / "selection.toml").read_text(encoding="utf-8"))
    return found


def suite_of(path: Path) -> str | None:
    """The suite with the longest path to a file below tests/; None where no suite has one."""
    there = {name: suite for suite, names in suites().items() for name in names}
    place = path.relative_to(TESTS)
    ways = (part.as_posix() for part in (place, *place.parents))
    return next((there[way] for way in ways if way in there), None)


def has_files_of(suite: str, folder: Path) -> bool:
    """Whether a folder below tests/ is on the way to a path of a suite, or lies in one."""
    if suite_of(folder) == suite:
        return True
    place = folder.relative_to(TESTS)
    return any(place in Path(name).parents for name in suites()[suite])


def files_of_tests() -> Iterator[Path]:
    """All files of tests."""
    return TESTS.rglob("test_*.py")
