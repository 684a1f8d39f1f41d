"""Output of every benchmark: a table, and with --json FILE its figures and ratios.

A ratio that cannot be measured, such as one to a peer that is not installed, is reported as missing
with the reason, and the benchmark ends with exit status 3.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the two arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and ratios")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, within a minute")
    return parser


ROOT = Path(__file__).parents[1]
MISSING_STATUS = 3
"""Exit status of a benchmark that could not measure all of its ratios."""


@dataclass
class Report:
    """The result of one benchmark; `ratios` are the subject of its claims."""

    name: str
    figures: dict[str, float | str] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Ratios that could not be measured, and why not."""

    @staticmethod
    def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with the first column left-aligned and the others right-aligned."""
        table = Table(title=title, title_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)

    def finish(self, file: Path | None) -> None:
        """Print the ratios and write the file, if one was given.

        Raises `SystemExit` with `MISSING_STATUS` when a ratio is missing.
        """
        for name, ratio in self.ratios.items():
            print(f"{name} = {ratio:.4g}")
        for name, reason in self.missing.items():
            print(f"{name} is missing: {reason}")
        if file is not None:
            write_whole(file, self.content())
        if self.missing:
            sys.exit(MISSING_STATUS)

    def content(self) -> dict[str, Any]:
        """Return what a file of results has."""
        return {
            "name": self.name,
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "figures": self.figures,
            "ratios": self.ratios,
            "missing": self.missing,
        }


def write_whole(file: Path, content: Any) -> None:
    """Write JSON to a file, which has the old or the new content at any time."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)


@cache
def commit() -> str:
    """Return the commit of the tree; where git knows none, a digest of its Python files."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # a bare machine has no git
        found = ""
    return found or f"tree-{_digest()}"


def _digest() -> str:
    found = hashlib.sha256()
    for file in sorted(ROOT.glob("[a-z]*/**/*.py")):
        if "build" not in file.parts:
            found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return found.hexdigest()[:12]
