"""Ties the lifetime of processes to others by Linux kernel features.

On other systems these functions do nothing; polling and leases remain, which are slower.

Exit statuses of a host's processes, recorded by their parent for other processes to read.

    WORKER_FOLDER/ends/1234   "its process failed: Killed(sig=9)"; empty while it runs

Monarch reaps its children; only a thread that blocks in the kernel for one of them sees its exit
before that. The exit of a process right after its start may be missed. The kernel uses a pid again,
on many machines after 32,768 processes and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.mesh.processes import children_of, wait_for_child

FOLDER = "ends"
EXIT_LOOK_S = 0.2
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
            time.sleep(EXIT_LOOK_S)

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


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.05


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_descendants(deadline_s: float = 10.0) -> list[int]:
    """Kill and reap all descendants of this process.

    Waits until none is left; returns those that remain at the deadline.
    """
    from composer_mesh.mesh.processes import descendants  # the keeper of boxes has no psutil

    end = time.monotonic() + deadline_s
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        collect()
        time.sleep(LOOK_S)
    return left


def collect() -> dict[int, int]:
    """Reap the children of this process that have ended; return their wait status by pid."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found
