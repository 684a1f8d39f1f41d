"""Notes in a file what is being executed, for the next start of a server that was killed by it.

A place of the file is one number of 8 bytes, 0 where it is free. It is written before its operation
begins, by one call that a killed process has made or not; it need not outlive the machine, so that
nothing waits for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_mesh.plugins.tinker.server.operations import Operation

WIDTH = 8
MOST_ATTEMPTS = 4
"""Attempts of an operation in which its process, or the server, may be lost before it fails."""


class Executing:
    """The numbers of the operations under way; those that an earlier process left are in `left`."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        found = os.pread(self._file, os.fstat(self._file).st_size, 0)
        numbers = (found[at : at + WIDTH] for at in range(0, len(found), WIDTH))
        self.left = sorted({int.from_bytes(one, "little") for one in numbers} - {0})
        self._free, self._places = list[int](), 0

    def clear(self) -> None:
        """Forget what was left, once the log has it."""
        os.ftruncate(self._file, 0)
        self.left = []

    @contextmanager
    def during(self, operations: Iterable[Operation]) -> Iterator[None]:
        """Note operations for as long as they are executed; a killed process leaves them noted."""
        places = [self._note(one.number) for one in operations]
        try:
            yield
        finally:
            for place in places:
                self._write(place, 0)
            self._free += places

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _note(self, number: int) -> int:
        if not self._free:
            self._free.append(self._places)
            self._places += 1
        place = self._free.pop()
        self._write(place, number)
        return place

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._file, number.to_bytes(WIDTH, "little"), place * WIDTH)
