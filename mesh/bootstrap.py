"""Entry point of every process that a run starts: Monarch's bootstrap, ignoring Ctrl-C.

Ctrl-C is handled by the controller, which stops its children in order; a child that handled it
itself would look like a crash. The process leads a process group, so that its children can be
killed with it, and ends with the process that started it: the controller, or the worker of another
host. Its arguments are the actor's name, for `ps`, a token of the run and that parent's pid. It
applies its resource limits before anything counts cores or GPUs, and refuses connections of other
users before it listens. All other set-up is done by the
actor's `load` endpoint.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time

if __name__ == "__main__":  # before Monarch is imported, which takes a second
    signal.signal(signal.SIGINT, signal.SIG_IGN)

from monarch._rust_bindings.monarch_hyperactor import bootstrap

from composer_mesh.mesh.connection_guard import guard_connections
from composer_mesh.mesh.process_resources import FOLDER, ShareMissing, take_share

LOOK_S = 0.5
serve = bootstrap.bootstrap_main


async def serve_and_end() -> None:
    """Serve until the controller stops this process, then exit immediately.

    Python's own shutdown would race with Monarch's threads: pending tasks, aborts, both noisy.
    """
    code: int = await serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with(parent: int) -> None:
    """Exit once this process is no longer a child of `parent`.

    Monarch does this too, but only after it is set up.
    """
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def take_share_or_end() -> None:
    """Apply the resources that the placement assigned; exit with an error if they are missing.

    An actor on other cores or GPUs than those assigned would disturb the processes that have them.
    """
    try:
        take_share()
    except ShareMissing as error:
        sys.stderr.write(f"composer-mesh: {sys.argv[1]}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def stand_where_the_user_does() -> None:
    """Change to the folder that relative paths of the config refer to; on a shared file system."""
    if folder := os.environ.get(FOLDER):
        os.chdir(folder)


def lead_a_group() -> None:
    """Leave the controller's process group, but not its session."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setpgid(0, 0)


if __name__ == "__main__":
    lead_a_group()
    stand_where_the_user_does()
    take_share_or_end()
    threading.Thread(target=end_with, args=[int(sys.argv[3])], daemon=True).start()
    guard_connections()
    bootstrap.bootstrap_main = serve_and_end
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
