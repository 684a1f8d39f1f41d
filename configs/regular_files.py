"""Reads regular files of a limited size, for files that somebody else may have written.

Opening a FIFO waits for a writer, a device never ends, and a file of many gigabytes fills the
memory. All of them are refused with an OSError here, before anything is read.

TOML that anyone may have written is bounded before it is parsed, and checked after; `TomlRefused`
has the line or the key in its message. Nothing here knows the schema.
"""

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class UnusableFile(OSError):
    """A file that is not read: no regular file, or one that is too long."""

    def __str__(self) -> str:
        return str(self.strerror or self.args[0])


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, without waiting; raises OSError for anything else.

    With `follow` False a symbolic link is refused too.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise unusual(path, mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def unusual(path: Path, mode: int) -> UnusableFile:
    """Return the error for a file of this mode, which is neither regular nor a folder."""
    said = f"{path.name} is a {_kind(mode)} and not a regular file"
    return UnusableFile(errno.EINVAL, said, str(path))


def read_regular(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Return a file's content; raises OSError unless it is regular with at most `most` bytes."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
        if size > most or len(content) > most:
            said = f"{path.name} has {size} bytes but at most {most} are read"
            raise UnusableFile(errno.EFBIG, said, str(path))
        return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "FIFO", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "socket")


LARGEST_FILE = 256 * 1024
MOST_DOTS = 64
"""Dots outside quotes of one line: a key of thousands of parts takes a parser minutes."""
DEEPEST = 20
LARGEST_INTEGER = 2**63 - 1
"""TOML's own bound of integers."""

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*("|\\?\Z)|\'[^\']*\'', re.DOTALL)
_LITERAL = re.compile(r"'[^']*'")
_COMMENT = re.compile(r"#.*")
_MANY_DIGITS = re.compile(r"[0-9_]{1000}")


class TomlRefused(Exception):
    """The text is not TOML that is read; the message says where and what to do."""


class NotToml(TomlRefused):
    """The text breaks the grammar of TOML."""


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text; raise OSError or `TomlRefused`. Never waits for a pipe."""
    try:
        return read_regular(path, LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise TomlRefused(
            f"cannot be read as text ({error}): give a readable UTF-8 TOML file"
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML into tables; raise `TomlRefused`."""
    _refuse_long_keys(text)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"is not valid TOML: {error}: correct that line") from None
    except RecursionError:
        raise TomlRefused(
            f"has brackets inside each other around line {_deepest_line(text)}, at most {DEEPEST} "
            "are read: flatten that value"
        ) from None
    except ValueError:  # Python's limit of digits
        raise TomlRefused(
            f"has a number of thousands of digits in line {_longest_number(text)}, at most 19 are "
            "read: write a smaller number"
        ) from None
    check_table(table)
    return table


def check_table(table: dict[str, Any]) -> None:
    """Raise `TomlRefused` for tables inside each other too deep, or an integer too large."""
    for depth, path, value in _values(table):
        if depth >= DEEPEST and isinstance(value, dict | list) and value:
            raise TomlRefused(
                f"has more than {DEEPEST} tables inside each other at the key {_joined(path)}: "
                "flatten them"
            )
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            raise TomlRefused(
                f"has an integer of {value.bit_length()} bits at the key {_joined(path)}, which "
                "must be between -2**63 and 2**63: write a smaller number"
            )


def _refuse_long_keys(text: str) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") <= MOST_DOTS:
            continue
        dots = _COMMENT.sub("", _QUOTED.sub(_unquoted, line)).count(".")
        if dots > MOST_DOTS:
            raise TomlRefused(
                f"has {dots} dots in line {number}, at most {MOST_DOTS} are read: break the line "
                "or shorten its key"
            )


def _unquoted(quoted: re.Match[str]) -> str:
    """Return the part of a quoted text that counts: none, or all if its line does not close it."""
    return _LITERAL.sub("", quoted[0]) if quoted[1] in ("", "\\") else ""


def _values(table: dict[str, Any]) -> Iterator[tuple[int, tuple[str, ...], Any]]:
    """Yield depth, path and value of all that a table contains, without recursion."""
    left: list[tuple[int, tuple[str, ...], Any]] = [(0, (), table)]
    while left:
        depth, path, value = left.pop()
        yield depth, path, value
        if isinstance(value, dict):
            left += [(depth + 1, (*path, str(name)), one) for name, one in value.items()]
        elif isinstance(value, list):
            left += [(depth + 1, path, one) for one in value]


def _joined(path: tuple[str, ...]) -> str:
    return ascii(".".join(part[:40] for part in path[:5]))


def _deepest_line(text: str) -> int:
    depth, deepest, found = 0, 0, 1
    for number, line in enumerate(text.split("\n"), start=1):
        depth += sum(map(line.count, "[{"))
        if depth > deepest:
            deepest, found = depth, number
        depth = max(0, depth - sum(map(line.count, "]}")))
    return found


def _longest_number(text: str) -> int:
    match = _MANY_DIGITS.search(text)
    return text.count("\n", 0, match.start() if match else 0) + 1
