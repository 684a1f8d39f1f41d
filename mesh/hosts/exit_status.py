"""Exit statuses of a host's processes, recorded by their parent for other processes to read.

    WORKER_FOLDER/ends/1234   "its process failed: Killed(sig=9)"

Monarch reaps its children; only a thread that blocks in the kernel for one of them sees its exit
before that. The exit of a process right after its start may be missed.
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
    """The exit statuses of one worker's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._folder.mkdir(exist_ok=True)

    def keep(self) -> None:
        """Record the exit of each child of this process; never returns."""
        known: set[int] = set()
        while True:
            living = set(children_of(os.getpid(), ()))
            for pid in living - known:
                name = f"end of {pid}"
                threading.Thread(target=self._note_end, args=[pid], name=name, daemon=True).start()
            known = living
            time.sleep(LOOK_S)

    def of(self, pid: int) -> str | None:
        """Return how a process ended; None if it is unknown or still running."""
        with contextlib.suppress(OSError):
            return (self._folder / str(pid)).read_text()
        return None

    def note(self, pid: int, words: str) -> None:
        """Record how a process ended."""
        draft = self._folder / f".{pid}"
        with contextlib.suppress(OSError):  # the folder is removed with its owner
            draft.write_text(words)
            draft.replace(self._folder / str(pid))

    def forget(self, pid: int) -> None:
        """Remove the record of an earlier process with this pid."""
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).unlink()

    def _note_end(self, pid: int) -> None:
        if (words := wait_for_child(pid)) is not None:
            self.note(pid, words)


async def how_it_ended(pid: int, records: Sequence[ExitStatuses]) -> str | None:
    """Return how a process ended that has just ended; None if its parent does not record it."""
    for _ in range(RECORDED_S * 10 if records else 0):
        found = [words for one in records if (words := one.of(pid)) is not None]
        if found:
            return found[0]
        await asyncio.sleep(0.1)
    return None
