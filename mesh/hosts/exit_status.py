"""Exit statuses of a host's processes, recorded by their parent for other processes to read.

    WORKER_FOLDER/ends/1234   "its process failed: Killed(sig=9)"; empty while it runs

Monarch reaps its children; only a thread that blocks in the kernel for one of them sees its exit
before that. The exit of a process right after its start may be missed. The kernel uses a pid again,
on many machines after 32,768 processes and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.mesh.processes import children_of, wait_for_child

FOLDER = "ends"
LOOK_S = 0.2
RECORDED_S = 1
"""Longest time until the parent of a process has recorded its exit status."""


class ExitStatuses:
    """The exit statuses of the processes that one process starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._folder.mkdir(exist_ok=True)

    def keep(self) -> None:
        """Record the exit of each child of this process; never returns."""
        known: set[int] = set()
        while True:
            living = set(children_of(os.getpid(), ()))
            for pid in living - known:
                self.begin(pid)
                name = f"end of {pid}"
                threading.Thread(target=self._note_end, args=[pid], name=name, daemon=True).start()
            known = living
            time.sleep(LOOK_S)

    def begin(self, pid: int) -> None:
        """Record that a process has started, in place of the end of an earlier one of this pid."""
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).unlink()  # also where no disk space is left for a new record
        self.note(pid, "")

    def of(self, pid: int) -> str | None:
        """Return how a process ended; None if it is unknown or still running."""
        with contextlib.suppress(OSError):
            return (self._folder / str(pid)).read_text() or None
        return None

    def recorded_ns(self, pid: int) -> int:
        """Return when the start or end of this pid was last recorded, in ns since 1970, or 0."""
        with contextlib.suppress(OSError):
            return (self._folder / str(pid)).stat().st_mtime_ns
        return 0

    def note(self, pid: int, words: str) -> None:
        """Record how a process ended."""
        draft = self._folder / f".{pid}"
        with contextlib.suppress(OSError):  # the folder is removed with its owner
            draft.write_text(words)
            draft.replace(self._folder / str(pid))

    def _note_end(self, pid: int) -> None:
        if (words := wait_for_child(pid)) is not None:
            self.note(pid, words)


async def how_it_ended(pid: int, records: Sequence[ExitStatuses]) -> str | None:
    """Return how a process ended that has just ended; None if its parent does not record it.

    The newest record of its pid is its parent's. Older ones are of earlier processes.
    """
    for _ in range(RECORDED_S * 10 if records else 0):
        newest = max(records, key=lambda one: one.recorded_ns(pid))
        if (words := newest.of(pid)) is not None:
            return words
        await asyncio.sleep(0.1)
    return None
