"""Entry point of the telemetry process: Monarch's own, but it ends with its parent.

Monarch lets it outlive its parent, even one that was killed. It leaves the terminal's foreground
process group, so that it does not receive Ctrl-C.
"""

from __future__ import annotations

import os
import runpy
import threading
import time

LOOK_S = 0.25


def end_with(parent: int) -> None:
    """Exit once this process is no longer a child of `parent`."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    os.setpgrp()
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    runpy.run_module("monarch._src.job._job_sidecar_worker", run_name="__main__", alter_sys=True)
