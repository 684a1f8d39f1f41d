"""Entry point of every process that a run starts: Monarch's bootstrap, ignoring Ctrl-C.

Ctrl-C is handled by the controller, which stops its children in order; a child that handled it
itself would look like a crash. The process leads a process group, so that its children can be
killed with it, and ends with the process that started it: the controller, or the worker of another
host. Its arguments are the actor's name, for `ps`, a token of the run and that parent's pid. It
applies its resource limits before anything counts cores or GPUs, and refuses connections of other
users before it listens. All other set-up is done by the actor's `load` endpoint. With a fork server
(`mesh.fork_server`) a fork of that does all of this, or this program in place of the fork, whose
fourth argument is the pid of the process that requested it.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence

from composer_mesh.mesh.fork_server.protocol import SERVER, run_forked

if __name__ == "__main__":  # before what takes a tenth of a second is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if SERVER in os.environ:
        run_forked(os.environ[SERVER], sys.argv[1:], int(sys.argv[3]))

from composer_mesh.mesh.connection_guard import guard_connections
from composer_mesh.mesh.environment import set_umask, use_import_paths
from composer_mesh.mesh.hosts.process_lifetime import wait_while_child_of
from composer_mesh.mesh.monarch_log import open_log
from composer_mesh.mesh.process_resources import FOLDER, ShareMissing, take_share


def main(arguments: Sequence[str], wait_for_parent: Callable[[], None]) -> None:
    """Serve one actor until the controller stops this process.

    `wait_for_parent` returns when this process must end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before Monarch is imported, which takes a second
    lead_a_group()
    set_umask()
    stand_where_the_user_does()
    use_import_paths()
    take_share_or_end(arguments[0])
    threading.Thread(target=end_after, args=[wait_for_parent], daemon=True).start()
    wrap_monarch(arguments[0])
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


def wrap_monarch(name: str) -> None:
    """Import Monarch, with its log in a private folder, guard its sockets, wrap its entry point."""
    open_log(name)
    guard_connections()
    from monarch._rust_bindings.monarch_hyperactor import bootstrap

    bootstrap.bootstrap_main = ending(bootstrap.bootstrap_main)


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


def end_after(wait_for_parent: Callable[[], None]) -> None:
    """Exit once this process has lost its parent. Monarch does this too, after it is set up."""
    wait_for_parent()
    os._exit(1)


def wait_for_end_of(pid: int) -> None:
    """Return once another process has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


def take_share_or_end(name: str) -> None:
    """Apply the resources that the placement assigned; exit with an error if they are missing.

    An actor on other cores or GPUs than those assigned would disturb the processes that have them.
    """
    try:
        take_share()
    except ShareMissing as error:
        sys.stderr.write(f"composer-mesh: {name}: {error}\n")
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


def wait_for_end(parent: int, asked_by: int | None = None) -> None:
    """Return once this process must end; one that a fork server forked is no child of `parent`."""
    if asked_by is None:
        wait_while_child_of(parent)
    else:
        wait_for_end_of(asked_by)


if __name__ == "__main__":
    main(sys.argv[1:], lambda: wait_for_end(*map(int, sys.argv[3:])))
