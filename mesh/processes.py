"""Looking after processes by their ids: who is alive, whose child it is, and the last resort.

Nothing here starts a process or knows Monarch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path

LOOK_S = 0.1


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not collected counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if state := _state(pid):
        return state not in ("Z", "X")
    return not _state(os.getpid())  # it was collected just now, or no state is told here


def stands_still(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not yet told to go on."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def children_of(parent: int, marks: Collection[str]) -> list[int]:
    """Living direct children of a process that have all these arguments in their command line."""
    return [
        pid
        for pid in _children(parent)
        if set(marks).issubset(_command_line(pid)) and is_alive(pid)
    ]


def _children(parent: int) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                pids.append(int(entry.name))
    return sorted(pids)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


async def wait_gone(pid: int, deadline_s: float) -> bool:
    """Wait until a process has ended; False when it still runs at the deadline.

    The kernel tells where it can; elsewhere the process is looked at again and again.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # no Linux, an old one, or no descriptor left
        return await _look_until_gone(pid, deadline_s)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), None if deadline_s == math.inf else deadline_s)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return not is_alive(pid)


async def end_of_child(pid: int) -> str | None:
    """Wait until a child of this process has ended; says how, in Monarch's words.

    None where somebody else collected it first, or where it is no child. A thread waits, because
    only one that sleeps in the kernel sees the end before Monarch collects the process.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    found: list[str | None] = []

    def wait() -> None:
        found.append(wait_for_child(pid))
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            loop.call_soon_threadsafe(told.set)

    threading.Thread(target=wait, name=f"end of {pid}", daemon=True).start()
    await told.wait()
    return found[0]


def wait_for_child(pid: int) -> str | None:
    """Sleep until a child of this process has ended; how, or None where that cannot be known."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"its process exited with code {ended.si_status}"
    return f"its process failed: Killed(sig={ended.si_status})"


async def _look_until_gone(pid: int, deadline_s: float) -> bool:
    end = asyncio.get_running_loop().time() + deadline_s
    while is_alive(pid):
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(LOOK_S)
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
