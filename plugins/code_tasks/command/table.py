"""The table at the end of making tasks: a line for each package, then what was refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from composer_mesh.plugins.code_tasks.command.making import Results

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
