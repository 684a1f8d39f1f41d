"""Texts of tools as the agent reads and writes them: cut, with numbered lines, and unified diffs.

Of a diff the context must match exactly; line numbers may be wrong.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from composer_mesh.plugins.code_tasks.static_rules import LARGEST

LONGEST_LINE = 500


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters and a line that says what is missing.

    The first third and the last two thirds are kept: failures are reported at the end.
    """
    if len(text) <= most:
        return text
    head = most // 3
    missing = len(text) - most
    return f"{text[:head]}\n[{missing:,} characters are left out here]\n{text[-(most - head) :]}"


def numbered(text: str, first: int, count: int) -> str:
    """Return some lines of a text with their numbers, and how many there are in all."""
    lines = text.splitlines()
    shown = lines[first - 1 : first - 1 + count]
    body = "\n".join(
        f"{number:>5}  {line[:LONGEST_LINE]}" for number, line in enumerate(shown, first)
    )
    rest = len(lines) - (first - 1 + len(shown))
    return f"{body}\n[{rest} more lines]" if rest > 0 else body


def decoded(content: bytes) -> str:
    """Return a file as text; what is no UTF-8 is replaced."""
    return content.decode("utf-8", errors="replace")


def syntax_error(path: str, content: str) -> tuple[int, str] | None:
    """Return line and message of a module's first syntax error; None if it has none."""
    if not path.endswith(".py") or len(content) > LARGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(content)
    except SyntaxError as error:
        return error.lineno or 0, str(error.msg)[:200]
    except (ValueError, RecursionError, MemoryError) as error:
        return 0, f"{type(error).__name__}: the module cannot be parsed"
    return None


HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*")
HEADER = re.compile(r"(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)")
MOST_COMPARED = 10_000_000
"""Lines of a file times hunks: each hunk is searched in the whole file."""
IGNORED = ("diff ", "index ", "new file", "deleted file", "old mode", "new mode", "similarity ")


class PatchFailed(ValueError):
    """A diff cannot be read, or does not fit the file that it names."""


@dataclass
class Hunk:
    """Lines that are replaced by others; `line` is where the diff says that they are."""

    line: int
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class FilePatch:
    """The hunks of one file; a file that is made or removed has no name on one side."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)


def read_patch(diff: str) -> list[FilePatch]:
    """Return the files of a diff; raise PatchFailed for anything else."""
    files: list[FilePatch] = []
    old: str | None = None
    for number, line in enumerate(diff.rstrip("\n").split("\n"), 1):
        hunks = files[-1].hunks if files else []
        if line.startswith("--- "):
            old = _name(line)
        elif line.startswith("+++ "):
            files.append(FilePatch(old, _name(line)))
        elif (found := HUNK.fullmatch(line)) is not None and files:
            hunks.append(Hunk(int(found.group(1))))
        elif hunks and (not line or line[0] in " +-"):
            if line[:1] != "+":
                hunks[-1].before.append(line[1:])
            if line[:1] != "-":
                hunks[-1].after.append(line[1:])
        elif line.strip() and not line.startswith((*IGNORED, "\\")):
            raise PatchFailed(f"line {number} of the diff is no part of one: {line[:60]!r}")
    if not any(file.hunks for file in files):
        raise PatchFailed("the diff has no hunk: write --- and +++ lines, then @@ and its lines")
    return files


def apply_hunks(text: str, hunks: list[Hunk]) -> str:
    """Return a text with hunks applied in order; raise PatchFailed where one fits nowhere."""
    lines = text.split("\n")
    if len(hunks) * len(lines) > MOST_COMPARED:
        raise PatchFailed(
            f"the diff has {len(hunks):,} hunks for {len(lines):,} lines: join hunks, or edit"
        )
    done = 0
    moved = 0
    for number, hunk in enumerate(hunks, 1):
        place = _place(lines, hunk, done, hunk.line - 1 + moved)
        if place is None:
            raise PatchFailed(f"hunk {number} does not match the file: its lines are not there")
        lines[place : place + len(hunk.before)] = hunk.after
        moved += len(hunk.after) - len(hunk.before)
        done = place + len(hunk.after)
    return "\n".join(lines)


def _place(lines: list[str], hunk: Hunk, first: int, stated: int) -> int | None:
    """Return where the lines of a hunk are, the nearest to where the diff says."""
    size = len(hunk.before)
    if not size:
        return min(max(first, stated + 1), len(lines))
    found = _places(lines, hunk.before, first)
    return min(found, key=lambda place: abs(place - stated), default=None)


def _places(lines: list[str], wanted: list[str], first: int) -> Iterator[int]:
    """Yield where some lines are, also overlapping, by the algorithm of Knuth, Morris and Pratt."""
    back = [0]  # the longest own beginning that ends at each of the wanted lines
    for line in wanted[1:]:
        same = back[-1]
        while same and wanted[same] != line:
            same = back[same - 1]
        back.append(same + (wanted[same] == line))
    same = 0
    for place in range(first, len(lines)):
        while same and (same == len(wanted) or wanted[same] != lines[place]):
            same = back[same - 1]
        same += wanted[same] == lines[place]
        if same == len(wanted):
            yield place + 1 - same


def _name(line: str) -> str | None:
    found = HEADER.match(line)
    name = found.group(1).strip() if found else ""
    return None if name in {"", "/dev/null"} else name
