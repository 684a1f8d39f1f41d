"""Reads JSON that somebody else may have written: as plain values or not at all.

`configs.regular_files` opens the files. `parsed_json` raises ValueError for every text that is no
JSON, however deep it is nested.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from composer_mesh.configs.regular_files import read_regular, unusual
from composer_mesh.configs.validation import place_and_text

MIB = 1 << 20
LONGEST_REASON = 200


def read_json(path: Path, most: int) -> Any:
    """Return the value of a JSON file; raise OSError, or ValueError if it is no JSON."""
    return parsed_json(read_regular(path, most))


def parsed_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; raise ValueError for any text that is not one."""
    return from_json(text)


def refuse_unusual(path: Path) -> None:
    """Raise UnusableFile for a pipe, a socket or a device; nothing is opened."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise unusual(path, mode)


def short_reason(error: Exception) -> str:
    """Return an error in one short line; a ValidationError as the place and text of its first."""
    if isinstance(error, ValidationError):
        text = place_and_text(error)
    else:
        text = str(error) or type(error).__name__
    line = text.partition("\n")[0]
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "…"
