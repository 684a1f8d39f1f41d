"""A program whose whole tree of processes ends with it, also where the test's time is over."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil


def run_tree(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output; raise TimeoutExpired after `timeout` seconds.

    A launcher of ranks makes each the leader of a session of its own, so that killing the launcher,
    or its group, leaves them behind: here all descendants are killed by their ids, before it.
    """
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(command), env=env, **streams) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants, by their ids."""
    parent = psutil.Process(pid)
    parent.suspend()  # it starts no further children, and does not replace the killed ones
    for one in [*parent.children(recursive=True), parent]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def has_ended(pid: int) -> bool:
    """Whether a process runs no more; what nobody has waited for is still listed then."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
