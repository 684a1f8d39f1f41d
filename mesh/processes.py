"""Utilities for processes by pid: liveness, children, waiting and killing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path

import psutil

LOOK_S = 0.1
TITLE, BOOTSTRAP = "composer-mesh", "composer_mesh.mesh.bootstrap"
"""How the command line of a run's process begins if it is forked, and what it has if it is not."""
START_FIELD = 19
"""Index of the start time after the command name in `/proc/PID/stat`."""


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie counts as gone."""
    try:
        return runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def runs(process: psutil.Process) -> bool:
    """Like `is_alive`, for a process that was looked up before."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def stands_still(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if unknown."""
    try:
        return int(psutil.Process(pid).memory_info().rss) or None
    except (psutil.Error, ValueError):
        return None


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds that a process has used in all its threads; None if unknown."""
    try:
        used = psutil.Process(pid).cpu_times()
    except (psutil.Error, ValueError):
        return None
    return float(used.user + used.system)


def start_ticks(pid: int) -> str:
    """Return the clock ticks from boot to the start of a process; "" if unknown.

    psutil's `create_time` is wall-clock time, which changes when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[START_FIELD]


def children_of(parent: int, marks: Collection[str]) -> list[int]:
    """Return the living direct children with all these arguments in their command line."""
    return [
        child.pid
        for child in _below(parent)
        if set(marks).issubset(_command_line(child)) and runs(child)
    ]


def is_started_by(pid: int, controller: int) -> bool:
    """Return whether a process of this user is one that a controller has started.

    Its command line ends with the controller's pid, also where a fork server has set it as a title.
    """
    try:
        words = " ".join(_command_line(psutil.Process(pid))).split()
    except psutil.Error:
        return False
    ours = words[:1] == [TITLE] or BOOTSTRAP in words
    return ours and words[-1] == str(controller) and is_of_this_user(pid)


def is_of_this_user(pid: int) -> bool:
    """Return whether a process has the same effective user as this one."""
    try:
        return bool(psutil.Process(pid).uids().effective == os.geteuid())
    except psutil.Error:
        return False


def descendants(root: int) -> list[int]:
    """Return all descendants of a process, including zombies."""
    return [child.pid for child in _below(root, recursive=True)]


def _below(pid: int, recursive: bool = False) -> list[psutil.Process]:
    try:
        found = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    return sorted(found, key=lambda child: child.pid)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


async def wait_gone(pid: int, deadline_s: float) -> bool:
    """Wait until a process has ended; return False if it still runs at the deadline.

    Uses a pidfd if the kernel has it, else polls.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, an old one, or no free descriptor
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
    """Wait until a child of this process has ended; return how, in Monarch's wording.

    Returns None if another thread collected it first, or if it is not a child. Waits in a thread,
    because only a blocking wait sees the end before Monarch collects the process.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    found: list[str | None] = []

    def wait() -> None:
        found.append(wait_for_child(pid))
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, name=f"end of {pid}", daemon=True).start()
    await ended.wait()
    return found[0]


def wait_for_child(pid: int) -> str | None:
    """Block until a child of this process has ended; return how, None if unknown."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else exit_in_words(ended)


def exit_in_words(ended: os.waitid_result) -> str:
    """Say how a process ended, in Monarch's wording."""
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
    """Kill a process that did not stop when requested."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that a process leads or led, and the process itself."""
    if pid != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    kill(pid)
