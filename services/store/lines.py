"""The JSON lines of a run directory: for people and tools, and for whoever follows a live run.

What has rows in `run.sqlite` is a copy here and can be made again; events are only here.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from composer_mesh.services.store.whole_files import write_whole


class Lines:
    """Files of a folder that lines are added to. Not shared between threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, BinaryIO] = {}
        self._dirty: set[str] = set()

    def add(self, name: str, line: bytes) -> None:
        """Add a line. Readers see it at once; `sync` puts it on the disk."""
        if name not in self._files:
            self._files[name] = (self._root / name).open("ab")
        self._files[name].write(line + b"\n")
        self._files[name].flush()
        self._dirty.add(name)

    def sync(self) -> None:
        """Have everything on the disk."""
        while self._dirty:
            os.fsync(self._files[self._dirty.pop()].fileno())

    def be(self, name: str, lines: Iterable[bytes]) -> None:
        """Make a file again as a whole where it is another one."""
        content, path = b"".join(line + b"\n" for line in lines), self._root / name
        if (path.read_bytes() if path.exists() else b"") == content:
            return
        if name in self._files:
            self._files.pop(name).close()
            self._dirty.discard(name)
        write_whole(path, content)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
