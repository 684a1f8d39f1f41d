"""Size of the tree by package: `make size`.

Statements are `ast.stmt` nodes. Docstring lines are those of all strings that stand alone, so the
sentence under a field counts too. Comment lines are all lines with a comment. Files that git
ignores are left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LAYERS = (
    *("configs", "losses", "rollouts", "channels", "tasks", "planning", "mesh", "actors"),
    "services",
)
"""Packages of the core, in the order in which they are printed; others follow by name."""
AROUND_THE_CORE = ("plugins", "benchmarks", "examples", "tests")
HEAD = ("", "files", "lines", "statements", "docstring lines", "comment lines", "longest file")


class Size(NamedTuple):
    """What was counted in one file or in several."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    docstring_lines: int = 0
    comment_lines: int = 0
    longest: tuple[int, str] = (0, "")
    """Lines and path of the longest file."""

    def row(self, name: str) -> tuple[str, ...]:
        """Columns as they are printed."""
        return (name, *(f"{count:,}" for count in self[:5]), "{1} ({0:,})".format(*self.longest))


def total(sizes: Iterable[Size]) -> Size:
    """The size of all of them."""
    every = list(sizes)
    return Size(
        sum(one.files for one in every),
        sum(one.lines for one in every),
        sum(one.statements for one in every),
        sum(one.docstring_lines for one in every),
        sum(one.comment_lines for one in every),
        max((one.longest for one in every), default=(0, "")),
    )


def size_of(root: Path, path: str) -> Size:
    """The size of a file. Raises SyntaxError if it cannot be parsed."""
    file = root / path
    text = file.read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text, path)) if isinstance(node, ast.stmt)]
    with file.open("rb") as source:
        comments = sum(one.type == tokenize.COMMENT for one in tokenize.tokenize(source.readline))
    lines = len(text.splitlines())
    return Size(1, lines, len(nodes), sum(map(docstring_lines, nodes)), comments, (lines, path))


def docstring_lines(node: ast.stmt) -> int:
    """Lines of a statement that is a string; 0 for any other."""
    match node:
        case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
            return last - first + 1
    return 0


def rows(sizes: dict[str, Size]) -> Iterator[tuple[str, ...]]:
    """The table: packages of the core, the core, each plugin, all plugins, the rest, and all."""
    groups: dict[str, list[Size]] = defaultdict(list)
    for path, size in sizes.items():
        top, *below = path.split("/")
        groups[top if below else "."].append(size)
        if top == "plugins" and len(below) > 1:
            groups[f"{top}/{below[0]}"].append(size)
    plugins = sorted(name for name in groups if name.startswith("plugins/"))
    core = groups.keys() - {*AROUND_THE_CORE, *plugins}
    for name in (*(one for one in LAYERS if one in core), *sorted(core.difference(LAYERS))):
        yield total(groups[name]).row(name)
    yield total(size for name in core for size in groups[name]).row("core")
    for name in (*plugins, *(one for one in AROUND_THE_CORE if one in groups)):
        yield total(groups[name]).row(name)
    yield total(sizes.values()).row("all")


def table(root: Path) -> str:
    """The sizes of the Python files of a git work tree, as text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = sorted(path for path in set(listed.split("\0")) if path and (root / path).is_file())
    found = [HEAD, *rows({path: size_of(root, path) for path in paths})]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return "\n".join(
        "  ".join(
            [
                name.ljust(widths[0]),
                *(count.rjust(width) for count, width in zip(counts, widths[1:], strict=False)),
                longest,
            ]
        )
        for name, *counts, longest in found
    )


if __name__ == "__main__":
    sys.stdout.write(f"{table(ROOT)}\n")
