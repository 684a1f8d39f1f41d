"""Entry point of every process that a run starts: Monarch's bootstrap, ignoring Ctrl-C.

Ctrl-C is handled by the controller, which stops its children in order; a child that handled it
itself would look like a crash. The process leads a process group, so that its children can be
killed with it, and ends with the process that started it: the controller, or the worker of another
host. Its arguments are the actor's name, for `ps`, a token of the run and that parent's pid. It
applies its resource limits before anything counts cores or GPUs. All other set-up is done by the
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
from collections.abc import Awaitable, Callable

if __name__ == "__main__":  # before Monarch is imported, which takes a second
    signal.signal(signal.SIGINT, signal.SIG_IGN)

from composer_mesh.mesh.environment import set_umask, use_import_paths
from composer_mesh.mesh.monarch_log import open_log
from composer_mesh.mesh.process_resources import FOLDER, ShareMissing, take_share

LOOK_S = 0.5


def ending(serve: Callable[[], Awaitable[int]]) -> Callable[[], Awaitable[None]]:
    """Wrap Monarch's entry point: serve until the controller stops this process, then exit at once.

    Python's own shutdown would race with Monarch's threads: pending tasks, aborts, both noisy.
    """

    async def serve_and_end() -> None:
        code = await serve()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    return serve_and_end


def wrap_monarch(name: str) -> None:
    """Import Monarch, with its log in a private folder, and wrap its entry point."""
    open_log(name)
    from monarch._rust_bindings.monarch_hyperactor import bootstrap

    bootstrap.bootstrap_main = ending(bootstrap.bootstrap_main)


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
    set_umask()
    stand_where_the_user_does()
    use_import_paths()
    take_share_or_end()
    threading.Thread(target=end_with, args=[int(sys.argv[3])], daemon=True).start()
    wrap_monarch(sys.argv[1])
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
