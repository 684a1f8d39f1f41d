"""One process of an environment server: reads its start from its input, answers lines, serves.

Its argument is the descriptor of the listening socket, which the processes of a server share.

first line     WorkerStart as JSON  -> "ready PORT"
"status"                            -> "serving N", which shows that the loop runs
"stop", or the end of the input     -> "stopped", after the sessions are closed
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from composer_mesh.configs.validation import validated_json
from composer_mesh.mesh.environment import use_import_paths
from composer_mesh.mesh.task_resources import attach_sandbox
from composer_mesh.plugins.openenv.server.app import ServedEnvironments, make_app
from composer_mesh.plugins.openenv.server.command import WorkerStart
from composer_mesh.plugins.openenv.server.late_rewards import RewardFile
from composer_mesh.plugins.openenv.server.mcp import Forwarding, McpSessions
from composer_mesh.plugins.openenv.server.session import SessionCounts, SessionPool
from composer_mesh.plugins.openenv.server.validation import MOST_REQUEST_BYTES
from composer_mesh.services.web.connections import OpenSocket
from composer_mesh.services.web.http_server import Access, http_config, listening
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task_loop import TaskRunner, TooManyBlocked

T = TypeVar("T")
_log = logging.getLogger(__name__)
CLOSING_S = 5
"""Seconds that requests under way are given when the server ends."""
REPLACED = 75
"""Exit status of a process that the task's own code has blocked."""


class _EndingRunner(TaskRunner):
    """Ends this process where the task's code has blocked too much of it; it is replaced then."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await super().run(work)
        except TooManyBlocked as blocked:
            _log.error("this process ends: %s", blocked)
            os._exit(REPLACED)


class Worker:
    """Serves a task on a shared socket, from `serving` to the end of the block."""

    def __init__(self, start: WorkerStart) -> None:
        self._start, self._options = start, start.options
        folder = Path(start.folder)
        self._counts = SessionCounts(
            folder / "sessions", self._options.processes, start.number, self._options.max_sessions
        )
        task = make_task(start.config)
        attach_sandbox(start.config, task)
        runner = _EndingRunner(task, start.config.environment.call_s)
        pool = SessionPool(runner, self._counts, self._options.session_timeout_s)
        self._forwarding = Forwarding(folder, self._options.processes, start.number)
        self._mcp = McpSessions(pool, start.number)
        rewards = RewardFile(folder / "rewards.sqlite")
        served = ServedEnvironments(pool, self._mcp, rewards, self._forwarding)
        self._bodies = served.bodies.budget
        self._app = Access(make_app(served), self._options.names, start.token)

    @property
    def sessions(self) -> int:
        """Open sessions of this process."""
        return self._counts.here

    @asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[int]:
        """Serve for a block; yields the port. Closes all sessions at its end."""
        config = http_config(
            self._app,
            CLOSING_S,
            bodies=self._bodies,
            ws=OpenSocket,
            ws_max_size=MOST_REQUEST_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
        )
        local_path = self._forwarding.path(self._start.number)
        local_path.unlink(missing_ok=True)
        with (
            listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as local,
            contextlib.closing(self._counts),
        ):
            local.bind(str(local_path))
            try:
                async with listening(config, listener, local, own_signals=True) as port:
                    yield port
            finally:
                await self._mcp.close()
                await self._forwarding.close()


async def _serve(
    start: WorkerStart,
    listener: socket.socket,
    read: Callable[[], str],
    say: Callable[[str], None],
) -> None:
    worker = await asyncio.to_thread(Worker, start)
    async with worker.serving(listener) as port:
        say(f"ready {port}")
        while (line := await asyncio.to_thread(read)).strip() == "status":
            say(f"serving {worker.sessions}")
    if line:
        say("stopped")


def _own_streams() -> tuple[TextIO, TextIO]:
    """Return the input and the output of this process, which the task's code cannot reach then.

    What that code prints goes to the error stream; its input is empty.
    """
    lines, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return lines, answers


def _allow_many_files() -> None:
    """Raise the bound of open files to what the user may have: a session holds one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Serve until the input ends or says stop."""
    logging.basicConfig(level=logging.WARNING, format="serve-env: %(message)s")
    lines, answers = _own_streams()
    _allow_many_files()
    use_import_paths()
    start = validated_json(WorkerStart, lines.readline())
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(start, listener, lines.readline, lambda text: print(text, file=answers)))
    os._exit(0)  # a function of the task that never returns holds up the end of an interpreter


if __name__ == "__main__":
    main()
