"""Reads a sample of the lines of a `metrics.jsonl`, in time that does not grow with the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from composer_mesh.configs.regular_files import open_regular
from composer_mesh.mesh.untrusted_json import MIB, parsed_json
from composer_mesh.services.directory.report import unreadable_copy

LONGEST_LINE = MIB
LAST_PART = 64 * 1024
"""Bytes at the end of a file in which its last line is looked for."""


def sampled_metrics(path: Path, most: int) -> list[dict[str, Any]]:
    """Return about `most` steps, evenly over the bytes of the file, and the last complete one.

    Raises RunDirectoryError for a file that cannot be read, or a line that is no JSON object.
    """
    try:
        with open_regular(path) as file:
            return _sampled(file, most)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable_copy(path, error) from None


def _sampled(file: BinaryIO, most: int) -> list[dict[str, Any]]:
    size = file.seek(0, os.SEEK_END)
    found: dict[int, dict[str, Any]] = {}
    for place in range(most):
        at = size * place // most
        if (line := _line_after(file, at)) is not None:
            found.setdefault(*line)
    last = max(0, size - LAST_PART)
    while (line := _line_after(file, last)) is not None:
        found.setdefault(*line)
        last = line[0] + 1
    return [found[at] for at in sorted(found)]


def _line_after(file: BinaryIO, at: int) -> tuple[int, dict[str, Any]] | None:
    """Return the first whole line that begins at a place or behind it, with its place."""
    file.seek(max(0, at - 1))
    if at and not file.readline(LONGEST_LINE).endswith(b"\n"):
        return None
    begun = file.tell()
    line = file.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        return None
    value = parsed_json(line)
    if not isinstance(value, dict):
        raise ValueError("a line is no JSON object")
    return begun, value
