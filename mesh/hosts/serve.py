"""The program of a worker that serves Monarch: it starts the processes of a run on its host.

A worker starts and monitors it (`worker`). Its argument is its process address. It ends with
its worker, and all processes that it started end with it. It records their exit statuses, which
only a parent receives, in the worker's folder, where the host's agent reads them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.hosts.process_lifetime import end_with_parent, exit_after
from composer_mesh.mesh.monarch_log import open_log

FOLDER = "COMPOSER_MESH_WORKER_FOLDER"
"""Environment variable with the worker's folder, set for all processes that it starts."""


def serve(address: str, folder: Path) -> None:
    """Serve a run until the worker ends this process."""
    prepare_environment()  # Monarch reads it when it is imported
    open_log("worker")
    from monarch.actor import run_worker_loop_forever

    from composer_mesh.mesh.connection_guard import guard_connections

    guard_connections()
    threading.Thread(
        target=ExitStatuses(folder).keep, name="ends of processes", daemon=True
    ).start()
    # The transport's certificates decide which clients may attach: docs/threat-model.md.
    run_worker_loop_forever(address=address, ca="trust_all_connections")


if __name__ == "__main__":
    worker = os.getppid()
    end_with_parent()  # by the kernel, where it does that
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_after, args=[worker, 1], daemon=True).start()
    serve(sys.argv[1], Path(os.environ[FOLDER]))
