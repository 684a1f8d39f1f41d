"""Reads what a program in a box reported. Agent code may have written any of it.

Nothing here makes a report trustworthy: it is checked for what honest programs never do, and what
remains is believed as far as the verdict does not rest on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_LINE = 4_000_000
MOST_LINES = 200_000


@dataclass(frozen=True)
class Report:
    """The lines of a program in order. `faults` names what an honest program never does."""

    lines: tuple[Mapping[str, Any], ...] = ()
    end: Mapping[str, Any] | None = None
    faults: frozenset[str] = field(default_factory=frozenset)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]


def read_report(stdout: bytes, mark: str, cut: bool = False) -> Report:
    """Return the lines with the mark, up to the first that is out of order."""
    lines: list[Mapping[str, Any]] = []
    faults = {"output_cut"} if cut else set[str]()
    for raw in stdout.split(b"\n")[:MOST_LINES]:
        if not raw.strip():
            continue
        line = _parsed(raw)
        if line is None or line.get("mark") != mark:
            faults.add("foreign_output")
        elif line.get("number") != len(lines) or (lines and lines[-1]["kind"] == "end"):
            faults.add("out_of_order")
            break
        else:
            lines.append(line)
    end = lines[-1] if lines and lines[-1]["kind"] == "end" else None
    if end is None:
        faults.add("early_exit")
    elif end.get("lines") != len(lines) - 1:
        faults.add("out_of_order")
    return Report(tuple(lines), end, frozenset(faults))


def _parsed(raw: bytes) -> Mapping[str, Any] | None:
    if len(raw) > LONGEST_LINE:
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("kind"), str) else None
