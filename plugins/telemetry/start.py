"""Monarch's telemetry of this process's meshes: a store of events that answers SQL.

The store is a process of its own (`telemetry_store`), reached through Unix sockets in the run's
private folder, and by nobody else. It must be started before the first actor; consecutive runs in
one process share it. The tables are Monarch's: docs/tree.md has examples.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.private_folder import subfolder
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.supervision import MeshError
from composer_mesh.plugins.telemetry.client import connected
from composer_mesh.plugins.telemetry.store import INGEST, LOG, QUERY

STORE = "composer_mesh.plugins.telemetry.store"
START_S, LOOK_S = 60.0, 0.05
_folder_of_this_process: list[Path] = []


class TelemetryFailed(Worded, MeshError):
    """The store could not be started; positional arguments, so that it can be pickled."""

    message = "telemetry could not be started ({0}): leave run.telemetry out"


async def start_telemetry() -> Path:
    """Start the store; return the socket that answers queries. The first call waits seconds."""
    if not _folder_of_this_process:
        _folder_of_this_process.append(await asyncio.to_thread(_start))
    return _folder_of_this_process[0] / QUERY


def _start() -> Path:
    folder = subfolder("telemetry")
    env = {**os.environ, "HYPERACTOR_PROCESS_NAME": "telemetry"}
    command = python_module(STORE, str(folder), str(os.getpid()))
    pid = programs.start_tied(command, env)
    atexit.register(_stop, pid)
    _wait_until_it_answers(folder, pid)
    _send_events_to(folder / INGEST)
    return folder


def _wait_until_it_answers(folder: Path, pid: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), connected(folder / QUERY):
            return
        if not is_alive(pid):
            raise TelemetryFailed(_last_line(folder / LOG))
        time.sleep(LOOK_S)
    raise TelemetryFailed(f"it did not answer within {START_S:g} s")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its process ended")


def _send_events_to(ingest: Path) -> None:
    """Send the events of this process, and of those that it starts, to the store."""
    from monarch._src.actor.proc_mesh import SetupActor

    SetupActor.register_startup_function(functools.partial(_sender, str(ingest)))
    send_events_to(str(ingest))


def _sender(ingest: str) -> Callable[[], None]:
    return functools.partial(send_events_to, ingest)


def send_events_to(ingest: str) -> None:
    """Send this process's events to a store; Monarch runs it in each process that it starts."""
    from monarch._rust_bindings.monarch_distributed_telemetry import _set_unix_socket_sink_path

    _set_unix_socket_sink_path(ingest)


def _stop(pid: int) -> None:
    """End the store; it also ends when this process does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
