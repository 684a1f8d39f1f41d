"""Ties the lifetime of processes to others by Linux kernel features.

On other systems these functions do nothing; polling and leases remain, which are slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S, PARENT_LOOK_S = 0.05, 0.5
LOST = 1
"""Exit status when nobody could say how a process ended."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_after(parent: int, status: int) -> None:
    """Exit with a status once this process is no longer a child of `parent`; for a thread."""
    wait_while_child_of(parent)
    os._exit(status)


def wait_while_child_of(parent: int) -> None:
    """Return once this process is no longer a child of `parent`; looks twice a second."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)


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


def end_as(code: int) -> NoReturn:
    """Exit with a code, or by the signal that a negative one stands for, without a core."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else LOST)


def collect() -> dict[int, int]:
    """Reap the children of this process that have ended; return their wait status by pid."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found
