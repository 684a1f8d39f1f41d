"""Looking after processes by their ids: who is alive, whose child it is, and the last resort.

Nothing here starts a process or knows Monarch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not collected counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def children_with(argument: str) -> list[int]:
    """Living direct children of this process that have `argument` in their command line."""
    return [pid for pid in _children() if argument in _command_line(pid) and is_alive(pid)]


def _children() -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                pids.append(int(entry.name))
    return pids


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


async def wait_gone(pid: int, deadline_s: float, poll_s: float = 0.02) -> bool:
    """Wait until a process has ended; False when it still runs at the deadline."""
    end = asyncio.get_running_loop().time() + deadline_s
    while is_alive(pid):
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(poll_s)
    return True


def kill(pid: int) -> None:
    """End a process that did not stop when asked."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """End the group that a process leads or led, also where it is gone itself; else only it."""
    if pid != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill(pid)
