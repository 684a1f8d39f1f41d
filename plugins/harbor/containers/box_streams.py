"""The output of commands: read as it comes, kept up to a bound, and drained after their end."""

from __future__ import annotations

import asyncio
import os

CHUNK = 1 << 16
MOST_READS = 1 + (1 << 20) // CHUNK
"""Reads that empty a pipe of the largest size."""
MOST_OPEN = 64
"""Streams that background processes may still write to; the oldest is closed beyond."""


class Output:
    """One stream of a command: a pipe whose end the command gets."""

    def __init__(self, most: int) -> None:
        self._file, self.its_own = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._file, False)
        self._most, self._kept, self.cut = most, bytearray(), False
        self._finished = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._read)

    @property
    def open(self) -> bool:
        """Whether a process may still write to it."""
        return self._file >= 0

    def given_away(self) -> None:
        """Close the end that the command has now."""
        os.close(self.its_own)

    def finish(self) -> bytes:
        """Return what was written until now; what comes later is read and dropped."""
        for _ in range(MOST_READS):  # others may write without end
            if not self.open or not self._read():
                break
        self._finished = True
        return bytes(self._kept)

    def close(self) -> None:
        """Close it; who writes to it is killed by a signal."""
        if self.open:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _read(self) -> bool:
        """Read what there is; return whether there was something."""
        try:
            piece = os.read(self._file, CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
        elif not self._finished:
            left = self._most - len(self._kept)
            self._kept += piece[:left]
            self.cut = self.cut or len(piece) > left
        return bool(piece)


class Outputs:
    """The streams of a container's commands that are still open."""

    def __init__(self) -> None:
        self._open: list[Output] = []

    def opened(self, most: int) -> Output:
        """Return a new stream of which at most so many bytes are kept."""
        self._open = [one for one in self._open if one.open]
        for one in self._open[: -MOST_OPEN or None]:
            one.close()
        made = Output(most)
        self._open.append(made)
        return made

    def close(self) -> None:
        """Close all of them."""
        for one in self._open:
            one.close()
