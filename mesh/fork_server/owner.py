"""The fork servers of a host: started for the first process that can use one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.fork_server.protocol import (
    FOLDER,
    READY,
    SERVER,
    import_signature,
    is_read_on_import,
)
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.private_folder import private_folder
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.supervision import MeshError, heard

PROGRAM = "composer_mesh.mesh.fork_server.server"
WAITING = 256
"""Processes that may wait for a server at once, for example while it imports."""


class ForkServerFailed(Worded, MeshError):
    """A fork server ended before it could fork."""

    message = (
        "the fork server ended while it imported torch and transformers, for the reason above: "
        "correct it, or set placement.fork_server to false"
    )


@dataclass(frozen=True)
class RunningForkServer:
    """A running server; `ready` completes when it can fork."""

    pid: int
    ready: asyncio.Future[None]


class ForkServers:
    """The fork servers that this process has started: one per set of import-time variables.

    Processes of vLLM start by themselves: it decides on its import how its own processes start.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._servers: dict[Path, RunningForkServer] = {}

    @property
    def pids(self) -> list[int]:
        """The servers' processes."""
        return [server.pid for server in self._servers.values()]

    async def environment(self, extra: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
        """Return what a process with `extra` variables needs in addition, to be forked.

        It is empty for a process that has to start by itself. A server that is missing is started;
        without `modules`, which it imports, none is. Waits until it can fork, because Monarch gives
        up on a process after half a minute. Raises `ForkServerFailed`.
        """
        if not sys.platform.startswith("linux") or any(name.startswith("VLLM_") for name in extra):
            return {}
        name = f"{import_signature({**os.environ, **extra})}.sock"
        if (shared := os.environ.get(FOLDER)) and (path := Path(shared) / name).exists():
            return {SERVER: str(path)}
        if not modules:
            return {}
        path = self._own_folder() / name
        server = self._servers.get(path)
        if server is None or not is_alive(server.pid):
            pid, said = start(path, modules, extra)
            ready = asyncio.ensure_future(asyncio.to_thread(wait_until_ready, said))
            ready.add_done_callback(heard)  # nobody may wait for it any more
            server = self._servers[path] = RunningForkServer(pid, ready)
        await asyncio.shield(server.ready)
        return {SERVER: str(path)}

    @property
    def statuses(self) -> list[ExitStatuses]:
        """Where the servers that this process uses record how forks have ended."""
        folders = [Path(shared)] if (shared := os.environ.get(FOLDER)) else []
        return [ExitStatuses(one) for one in (*folders, self._folder) if one is not None]

    def close(self) -> None:
        """End the servers that this process has started; their forks end with their requesters."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            programs.reap(pid)
        self._servers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fork-", dir=private_folder()))
        return self._folder


def start(
    path: Path, modules: Sequence[str], extra: Mapping[str, str], program: str = PROGRAM
) -> tuple[int, int]:
    """Start a server that listens on `path` and ends with this process.

    Returns its pid and the descriptor for `wait_until_ready`.
    """
    path.unlink(missing_ok=True)
    said, says = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(WAITING)
        passed = (listening.fileno(), says)
        arguments = [*map(str, passed), str(path.parent), str(os.getpid()), *modules]
        read = {name: value for name, value in extra.items() if is_read_on_import(name)}
        command = python_module(program, *arguments)
        pid = programs.start_tied(command, {**os.environ, **read}, pass_fds=passed)
    os.close(says)
    return pid, said


def wait_until_ready(said: int) -> None:
    """Block until a server can fork. Raises `ForkServerFailed`."""
    with os.fdopen(said, "rb") as pipe:
        if pipe.read() != READY:
            raise ForkServerFailed
