"""Waits until a process that Monarch starts is ready."""

from __future__ import annotations

from typing import Any

from monarch.config import get_global_config

from composer_mesh.mesh.supervision import ProcessLate, RemoteError, call

TOO_LATE = "error spawning proc mesh: statuses: Timeout"
"""How Monarch says that a process was not ready in time: 30 s. With a higher limit, Monarch 0.7
waits on without ever finding it ready."""


async def until_ready(ref: Any, actor: str, host: str, deadline_s: float) -> str:
    """Wait until the process of the actor mesh `ref` is ready; return Monarch's name of the mesh.

    Raises `ProcessLate` after Monarch's limit, and the errors of `call`.
    """
    try:
        mesh_name: str = await call(ref._name, deadline_s, actor, "spawn")
    except RemoteError as error:
        if TOO_LATE in error.text:
            limit = str(get_global_config()["mesh_proc_spawn_max_idle"])
            raise ProcessLate(actor, host, limit, 1) from None
        raise
    return mesh_name
