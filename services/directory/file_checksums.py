"""Checksums of the files of a run that no row and no manifest covers: `checksums.json`.

    {"events.jsonl": {"bytes": 1114, "crc32": "89abcdef"}, "config.toml": {...}, ...}

Of a file that grows by lines the first `bytes` bytes are meant: the last lines before a kill may be
in no checksum. A resumed run continues from the checksum that it finds, so it never takes damage
for lines of its own.

Files with rows in `run.sqlite` are copies that can be rebuilt; events are stored in files only.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from composer_mesh.configs.regular_files import open_regular
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import MIB, read_json, short_reason

CHECKSUMS_FILE = "checksums.json"
_CRC = re.compile(r"[0-9a-f]{8}")
_PIECE = 1 << 20


@dataclass(frozen=True)
class FileSum:
    """The CRC-32 of the first `size` bytes of a file."""

    size: int = 0
    crc: int = 0

    def followed_by(self, content: bytes) -> FileSum:
        """Return the checksum with so many bytes more."""
        return FileSum(self.size + len(content), zlib.crc32(content, self.crc))


class FileChecksums:
    """The checksums of one run's files. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        """Read what is there; a file that cannot be read counts as none, and is replaced."""
        self._root = root
        try:
            self._sums = read_checksums(root)
        except (OSError, ValueError):
            self._sums = {}
        self._known: set[str] = set()
        self._changed = False

    def whole(self, name: str, content: bytes) -> None:
        """Note a file that was written as a whole."""
        self._put(name, FileSum().followed_by(content))

    def appended(self, name: str, content: bytes) -> None:
        """Note what was appended to a file, which this process alone appends to."""
        if name not in self._known:
            self._known.add(name)
            before = self._sums.get(name, FileSum())
            self._put(name, self._on_disk(name, before, len(content)))
        self._put(name, self._sums[name].followed_by(content))

    def write(self) -> None:
        """Write the checksums if any has changed; they are not waited for on the disk."""
        if not self._changed:
            return
        self._changed = False
        table = {
            name: {"bytes": one.size, "crc32": f"{one.crc:08x}"}
            for name, one in sorted(self._sums.items())
        }
        with OpenFolder(self._root) as folder:
            content = json.dumps(table, indent=1).encode() + b"\n"
            folder.write_whole(CHECKSUMS_FILE, content, synced=False)

    def _put(self, name: str, found: FileSum) -> None:
        self._sums[name], self._changed = found, True

    def _on_disk(self, name: str, before: FileSum, without: int) -> FileSum:
        """Continue a checksum by the lines that were written before a kill, but not noted."""
        with open_regular(self._root / name, follow=False) as file:
            end = os.fstat(file.fileno()).st_size - without
            file.seek(min(before.size, end))
            while (left := end - file.tell()) > 0:
                before = before.followed_by(file.read(min(left, _PIECE)))
        return before


def read_checksums(root: Path) -> dict[str, FileSum]:
    """Return the checksums of a run, none if it has noted none; raises OSError or ValueError."""
    try:
        found = read_json(root / CHECKSUMS_FILE, MIB)
    except FileNotFoundError:
        return {}
    try:
        return {str(name): _file_sum(**about) for name, about in found.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(short_reason(error)) from None


def _file_sum(bytes: int, crc32: str) -> FileSum:
    if type(bytes) is not int or bytes < 0 or not _CRC.fullmatch(crc32):
        raise ValueError("a checksum is malformed")
    return FileSum(bytes, int(crc32, 16))


def difference(path: Path, noted: FileSum, grows: bool) -> str:
    """Return how a file differs from its checksum; empty if it does not. Raises OSError."""
    with open_regular(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size < noted.size or (size > noted.size and not grows):
            return f"it has {size} bytes, and {noted.size} were written"
        crc = _crc_of(file, noted.size)
    return "" if crc == noted.crc else f"its CRC-32 is {crc:08x}, and {noted.crc:08x} was written"


def _crc_of(file: BinaryIO, left: int) -> int:
    crc = 0
    while left > 0 and (piece := file.read(min(left, _PIECE))):
        crc, left = zlib.crc32(piece, crc), left - len(piece)
    return crc


class AppendedLines:
    """Append-only files of a folder, through no links below it. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, OpenFolder(root)
        self._files: dict[str, FileIO] = {}
        self._dirty: set[str] = set()
        self.checksums = FileChecksums(root)
        """Those of the files that are no copies of rows."""

    def add(self, name: str, line: bytes, *, copy: bool = False) -> None:
        """Append a line. Readers see it at once; `sync` puts it on disk.

        Lines that are no copies of rows get a checksum.
        """
        if name not in self._files:
            # Unbuffered, so that nothing is left to fail once more when the file is closed.
            self._files[name] = self._folder.append(name)
        left = memoryview(line + b"\n")
        while left:
            left = left[self._files[name].write(left) :]
        if not copy:
            self.checksums.appended(name, line + b"\n")
        self._dirty.add(name)

    def sync(self) -> None:
        """Flush all files to disk."""
        while self._dirty:
            os.fsync(self._files[self._dirty.pop()].fileno())

    def be(self, name: str, lines: Iterable[bytes]) -> None:
        """Rewrite a file atomically if its content differs from these lines."""
        content, path = b"".join(line + b"\n" for line in lines), self._root / name
        if (path.read_bytes() if path.exists() else b"") == content:
            return
        if name in self._files:
            self._files.pop(name).close()
            self._dirty.discard(name)
        self._folder.write_whole(name, content)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._folder.close()
