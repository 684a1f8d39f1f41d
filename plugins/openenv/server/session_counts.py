"""How many sessions the processes of a server hold together, in a file that they all map.

Each process writes its own count alone. Two that look at the same moment may both find the last
place, so the bound is passed by at most one session for each further process.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Self

SIZE = 8


class SessionCounts:
    """The counts of all processes; this one is `number`."""

    def __init__(self, path: Path, processes: int, number: int, most: int) -> None:
        """Open or make the file, and count no session of this process."""
        self._own, self.most = slice(number * SIZE, (number + 1) * SIZE), most
        with path.open("a+b") as file:
            file.truncate(processes * SIZE)
            self._map = mmap.mmap(file.fileno(), processes * SIZE)
        self._set(0)
        self.here = 0

    @property
    def active(self) -> int:
        """Sessions of all processes."""
        whole = bytes(self._map)
        parts = range(0, len(whole), SIZE)
        return sum(int.from_bytes(whole[at : at + SIZE], "little") for at in parts)

    def take(self) -> bool:
        """Count one more session of this process; return False where all places are taken."""
        if self.active >= self.most:
            return False
        self.here += 1
        self._set(self.here)
        return True

    def give_back(self) -> None:
        """Count one session less."""
        self.here -= 1
        self._set(self.here)

    def close(self) -> None:
        """Count none, and release the file."""
        self._set(0)
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, count: int) -> None:
        self._map[self._own] = count.to_bytes(SIZE, "little")
