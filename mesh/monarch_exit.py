"""Shuts Monarch's client down at the exit of a process, and waits until it has ended."""

from __future__ import annotations

import atexit
import functools
import os

from monarch.actor import context, shutdown_context

FLUSH_S = 0.3
"""Longest wait for each last flush, which is never confirmed by a host that is gone; Monarch's."""
EXIT_S = 10.0


@functools.cache
def end_client_at_exit() -> None:
    """End Monarch's client before this process exits. Called once the client may start.

    Monarch's own handler gives up after a second, less than the flushes may take on a busy machine;
    its threads then need an interpreter that is gone, and abort the process.
    """
    context()  # which registers that handler: ours, registered later, runs before it
    atexit.register(_end_client, os.getpid())


def _end_client(pid: int) -> None:
    if pid == os.getpid():  # a forked process has none of Monarch's threads
        shutdown_context(host_timeout=FLUSH_S).get(timeout=EXIT_S)
