"""Makes the tasks of several packages, some at once, and writes them into one file.

The table at the end has a line for each package, then what was refused and why.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_mesh.plugins.code_tasks.command.sources import SourceUnavailable, opened
from composer_mesh.plugins.code_tasks.making.make import Made, made_of
from composer_mesh.plugins.code_tasks.making.package import (
    MakingLimits,
    Package,
    PackageRefused,
    package_of,
)
from composer_mesh.tasks.sandbox import Sandbox

HELD_OUT_EVERY = 5


@dataclass
class Results:
    """What came of each source that is done."""

    sources: Sequence[str]
    done: dict[str, Made | str] = field(default_factory=dict)

    @property
    def made(self) -> list[Made]:
        """The packages of which tasks could be tried, in the order of the sources."""
        found = [self.done.get(one) for one in self.sources]
        return [one for one in found if isinstance(one, Made)]

    @property
    def refused(self) -> dict[str, str]:
        """Why others could not be used."""
        return {one: why for one, why in self.done.items() if isinstance(why, str)}

    def write(self, path: Path, heldout: Sequence[str]) -> int:
        """Write all rows, held-out packages marked; return how many tasks these are.

        The file is there whole or not at all.
        """
        packages = sorted(one.package for one in self.made if one.tasks)
        apart = held_out(packages, heldout)
        tasks = sum(len(one.tasks) for one in self.made)
        if not tasks:
            return 0
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            for one in self.made:
                split = "heldout" if one.package in apart else "train"
                for row in one.rows:
                    marked = {**row, "split": split} if apart and "name" in row else row
                    file.write(json.dumps(marked, sort_keys=True) + "\n")
        temporary.replace(path)
        return tasks


def held_out(packages: Sequence[str], named: Sequence[str]) -> frozenset[str]:
    """Return the packages whose tasks are held out: the named ones, or each fifth.

    Of a single package none is: then tasks of it are, by `data.heldout_every`.

    >>> held_out(["a", "b", "c"], [])
    frozenset({'c'})
    """
    if named:
        return frozenset(named)
    if len(packages) < 2:
        return frozenset()
    return frozenset(packages[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or packages[-1:])


async def make_all(
    results: Results,
    sandbox: Sandbox,
    *,
    indexes: Sequence[str],
    in_boxes: Sequence[str],
    limits: MakingLimits,
    limit: int | None,
    at_once: int,
    say: Callable[[str], None],
) -> None:
    """Make the tasks of all sources. Waits for boxes; a source that cannot be used is reported."""
    slots = asyncio.Semaphore(at_once)

    async def one(source: str) -> None:
        async with slots:
            try:
                package = await asyncio.to_thread(_package, source, indexes, in_boxes)
                made = await made_of(sandbox, package, limits, limit)
            except (PackageRefused, SourceUnavailable) as error:
                results.done[source] = str(error)
                say(f"{source}: refused: {error}")
                return
        results.done[source] = made
        figures = f"{len(made.tasks)} tasks of {made.candidates} candidates, {made.seconds:.0f} s"
        say(f"{source}: {figures}")

    await asyncio.gather(*map(one, results.sources))


def _package(source: str, indexes: Sequence[str], in_boxes: Sequence[str]) -> Package:
    found = opened(source, indexes)
    package = package_of(found.name, found.version, found.sha256, found.files, in_boxes)
    return replace(package, fewest_lines=found.fewest_lines)


HEAD = ("package", "tests", "stable", "candidates", "tasks", "values", "lines", "failing", "s")
WIDTH = 28


def table_of(results: Results) -> Iterator[str]:
    """Yield the lines of the table; lines and failing tests are medians of a task."""
    yield _line(*HEAD)
    for one in results.made:
        name = f"{one.package} {one.version}"
        counts = (one.tests, one.stable, one.candidates, len(one.tasks), one.with_cases)
        yield _line(name, *counts, one.median_lines, one.median_failing, round(one.seconds))
    every = [task for one in results.made for task in one.tasks]
    kinds = Counter(task["kind"] for task in every)
    candidates = sum(one.candidates for one in results.made)
    values = sum(one.with_cases for one in results.made)
    yield _line("all", "", "", candidates, len(every), values, "", "", "")
    yield "kinds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    reasons: Counter[str] = Counter()
    for one in results.made:
        reasons.update(one.refused)
    for reason, count in reasons.most_common():
        yield f"candidates refused: {count}: {reason}"
    for source, reason in results.refused.items():
        yield f"{source}: refused: {reason}"


def _line(name: str, *values: object) -> str:
    return f"{name:{WIDTH}}" + "".join(f"{value!s:>11}" for value in values)
