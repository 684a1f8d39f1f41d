"""Programs that have just been started: the system knows their arguments a moment later."""

from __future__ import annotations

import time
from pathlib import Path

DEADLINE_S = 60.0


def until_named(pid: int) -> None:
    """Wait until the command line of a process that was just started can be read.

    `Popen` returns once the child's descriptors are closed for the new program, before the kernel
    has its arguments: until then they are empty, on a busy machine every other time.
    """
    end = time.monotonic() + DEADLINE_S
    while not Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"process {pid} has no command line"
        time.sleep(0.001)
