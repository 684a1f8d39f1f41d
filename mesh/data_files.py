"""Reads data files that somebody else may have written: kind and size are checked before a byte.

Pipes, sockets, devices and folders are refused, because reading one may wait forever or never end.
JSON comes as plain values or not at all: `parsed_json` raises ValueError for every text that is no
JSON, however deep it is nested.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError
from pydantic_core import from_json

MIB = 1 << 20
LONGEST_REASON = 200


class UnusableFile(OSError):
    """A file that is not read: no ordinary file, or one that is too long."""

    def __str__(self) -> str:
        return str(self.strerror or self.args[0])


@contextmanager
def opened(path: Path, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Open an ordinary file for reading; raise OSError for anything else.

    With `follow` False a symbolic link is refused too.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableFile(None, "it is no ordinary file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_bytes(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Return the content of an ordinary file of at most `most` bytes; raise OSError otherwise."""
    with opened(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise UnusableFile(None, f"it has more than {most} bytes, the most that is read", str(path))
    return content


def read_json(path: Path, most: int) -> Any:
    """Return the value of a JSON file; raise OSError, or ValueError if it is no JSON."""
    return parsed_json(read_bytes(path, most))


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
        raise UnusableFile(None, f"{path.name} is no ordinary file", str(path))


def short_reason(error: Exception) -> str:
    """Return an error in one short line; a ValidationError as the place and text of its first."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{where}: {first['msg']}" if where else str(first["msg"])
    else:
        text = str(error) or type(error).__name__
    line = text.partition("\n")[0]
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "…"
