"""Entry point of every process that a run starts: Monarch's bootstrap, ignoring Ctrl-C.

Ctrl-C is handled by the controller, which stops its children in order; a child that handled it
itself would look like a crash. The process leads a process group, so that its children can be
killed with it, and ends with the process that started it: the controller, or the worker of another
host. Its arguments are the actor's name, for `ps`, a token of the run and that parent's pid. It
applies its resource limits before anything counts cores or GPUs. All other set-up is done by the
actor's `load` endpoint. With a fork server (`mesh.fork_server`) a fork of that does all of this.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from composer_mesh.mesh.fork_server.client import run_forked
from composer_mesh.mesh.fork_server.protocol import SERVER

LOOK_S = 0.5


def main(arguments: Sequence[str], wait_for_parent: Callable[[], None]) -> None:
    """Serve one actor until the controller stops this process.

    `wait_for_parent` returns when this process must end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before Monarch is imported, which takes a second
    lead_a_group()
    stand_where_the_user_does()
    take_share_or_end(arguments[0])
    threading.Thread(target=end_after, args=[wait_for_parent], daemon=True).start()
    from monarch._rust_bindings.monarch_hyperactor import bootstrap

    serve = bootstrap.bootstrap_main

    async def serve_and_end() -> None:
        """Serve until the controller stops this process, then exit immediately.

        Python's own shutdown would race with Monarch's threads: pending tasks, aborts, both noisy.
        """
        code: int = await serve()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    bootstrap.bootstrap_main = serve_and_end
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


def end_after(wait_for_parent: Callable[[], None]) -> None:
    """Exit once this process has lost its parent. Monarch does this too, after it is set up."""
    wait_for_parent()
    os._exit(1)


def wait_while_child_of(parent: int) -> None:
    """Return once this process is no longer a child of `parent`."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)


def wait_for_end_of(pid: int) -> None:
    """Return once another process has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


def take_share_or_end(name: str) -> None:
    """Apply the resources that the placement assigned; exit with an error if they are missing.

    An actor on other cores or GPUs than those assigned would disturb the processes that have them.
    """
    from composer_mesh.mesh.process_resources import ShareMissing, take_share

    try:
        take_share()
    except ShareMissing as error:
        sys.stderr.write(f"composer-mesh: {name}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def stand_where_the_user_does() -> None:
    """Change to the folder that relative paths of the config refer to; on a shared file system."""
    from composer_mesh.mesh.process_resources import FOLDER

    if folder := os.environ.get(FOLDER):
        os.chdir(folder)


def lead_a_group() -> None:
    """Leave the controller's process group, but not its session."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setpgid(0, 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    starter = int(sys.argv[3])
    if server := os.environ.get(SERVER):
        run_forked(server, sys.argv[1:], starter)
    main(sys.argv[1:], lambda: wait_while_child_of(starter))
