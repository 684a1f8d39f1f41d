"""The tables of docs/gpu.md, from the newest results of each part in docs/gpu/.

python benchmarks/gpu_tables.py     # writes them into the page; a test compares both
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "gpu.md", DOCS / "gpu"
BEGIN, END = "<!-- begin: benchmarks/gpu_tables.py -->", "<!-- end -->"
NONE = "None yet: `make gpu-day` has not run on a GPU since it was written. Older figures follow."
KERNELS = 3
"""Kernels that are named of a measurement that misses its bar."""


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(text, RESULTS), encoding="utf-8")


def with_tables(text: str, folder: Path) -> str:
    """Return the text of the page with the tables of a folder's results between its marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables(folder)}\n\n{END}{after}"


def tables(folder: Path) -> str:
    """Return a table for each part, of the newest file that has rows of it."""
    days = [json.loads(one.read_text(encoding="utf-8")) for one in sorted(folder.glob("*.json"))]
    days = sorted((one for one in days if not one["dry"]), key=lambda one: str(one["day"]))
    newest = {
        name: (day, part)
        for day in days
        for name, part in day["parts"].items()
        if part["rows"] or part["status"] != "skipped"
    }
    return "\n\n".join("\n".join(_part(name, *one)) for name, one in newest.items()) or NONE


def _part(name: str, day: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    where = f"{day['card']}, torch {day['torch']}, CUDA {day['cuda']}, driver {day['driver']}"
    yield f"**`{name}`** ({day['day']}, {where}, commit {part['commit']})\n"
    if part["why"]:
        yield f"{part['status']}: {_cell(part['why'].splitlines()[-1])}\n"
    if not part["rows"]:
        return
    yield "| measured | value | limit | ratio | bar |\n|---|---|---|---|---|"
    for row in part["rows"]:
        value, limit = f"{row['value']:,.4g} {row['unit']}".strip(), f"{row['limit']:,.4g}"
        yield f"| {_cell(row['name'])} | {value} | {limit} | {row['ratio']:.2f} | {_bar(row)} |"


def _bar(row: dict[str, Any]) -> str:
    if row["bar"] is None:
        return ""
    found = (
        f"{'<=' if row['at_most'] else '>='} {row['bar']:g}, {'met' if row['met'] else 'missed'}"
    )
    kernels = [f"{_cell(one['name'])} {one['share']:.0%}" for one in row["profile"][:KERNELS]]
    return found if row["met"] or not kernels else f"{found}: {', '.join(kernels)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
