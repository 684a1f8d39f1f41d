"""Monarch's telemetry of this process's meshes: an event store queried in SQL over HTTP.

The store is Monarch's own process, which listens on the loopback interface only and requires no
token. It must be started before the first actor; consecutive runs in one process share it. The
tables are Monarch's: docs/tree.md has examples.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import shutil
import uuid
from pathlib import Path

from composer_mesh.mesh.supervision import MeshError

SIDECAR = "composer_mesh.mesh.sidecar"
_address_of_this_process: list[str] = []


class TelemetryFailed(MeshError):
    """The store could not be started; positional arguments, so that it can be pickled."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return f"telemetry could not be started ({self.args[0]}): leave run.telemetry out"


async def start_telemetry() -> str:
    """Start the store; return its address. The first call waits a second or two."""
    if not _address_of_this_process:
        try:
            _address_of_this_process.append(await asyncio.to_thread(_start))
        except Exception as error:
            raise TelemetryFailed(f"{type(error).__name__}: {error}") from error
    return _address_of_this_process[0]


def _start() -> str:
    # Imported lazily: it loads a web server, which a run without telemetry does not need.
    from monarch._src.job.job_sidecar import (
        job_sidecar_lock_path,
        sidecar_transport_from_runtime,
        spawn_module,
    )
    from monarch._src.job.telemetry_config import (
        Telemetry,
        TelemetryConfig,
        install_sidecar_socket_sink,
    )

    name = f"composer-mesh-{uuid.uuid4().hex}"
    transport = sidecar_transport_from_runtime()
    atexit.register(_stop, name)
    spawn_module(
        job_sidecar_lock_path(name),
        (name, transport, None),  # by which Monarch recognizes it as its own
        SIDECAR,
        runtime_transport=transport,
        process_name="telemetry",
    )
    about = Telemetry(TelemetryConfig()).ensure_open(name)
    install_sidecar_socket_sink(about["socket_path"])
    return about["telemetry_url"]


def _stop(name: str) -> None:
    """Stop the store's process and delete its files; it also ends when this process does."""
    from monarch._src.job.job_sidecar import job_sidecar_lock_path, stop_job_sidecar
    from monarch._src.job.once_daemon import daemon_log_path
    from monarch._src.job.telemetry_actor import telemetry_socket_dir

    with contextlib.suppress(Exception):  # it may have ended first
        stop_job_sidecar(name)
    lock = job_sidecar_lock_path(name)
    for file in (lock, daemon_log_path(lock)):
        Path(file).unlink(missing_ok=True)
    shutil.rmtree(telemetry_socket_dir(name), ignore_errors=True)
