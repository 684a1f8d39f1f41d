"""The program of the telemetry process: Monarch's own, but it ends when who began it does.

Monarch lets it outlive whoever began it, also one that was killed. Ctrl-C is not for it: it is no
part of the terminal's foreground group.
"""

from __future__ import annotations

import os
import runpy
import threading
import time

LOOK_S = 0.25


def end_with(parent: int) -> None:
    """End this process once it is no longer that process's child."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    os.setpgrp()
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    runpy.run_module("monarch._src.job._job_sidecar_worker", run_name="__main__", alter_sys=True)
