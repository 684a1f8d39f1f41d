"""Starts a process at its placement, and waits for a host with capacity if it has none."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import FaultPolicy
from composer_mesh.planning.placement_solver import NoCapacity
from composer_mesh.services.pool.process_placement import ProcessPlacement

T = TypeVar("T")

LOOK_S = 1.0


async def wait_for_capacity(
    take: Callable[[], T], host: MeshHost, name: str, look_s: float = LOOK_S
) -> T:
    """Return the result of `take`, retrying until a host has capacity; for displaced processes.

    Records the wait and its reason. Raises `NoCapacity` after `host.capacity_wait_s`.
    """
    loop, told = asyncio.get_running_loop(), False
    end = loop.time() + host.capacity_wait_s
    while True:
        try:
            return take()
        except NoCapacity as error:
            if loop.time() >= end:
                raise
            if host.supervisor is not None and not told:
                host.supervisor.note("waits_for_capacity", name, str(error))
            told = True
        await asyncio.sleep(look_s)


async def spawn_on(
    host: MeshHost,
    placement: ProcessPlacement,
    name: str,
    actor_class: type[MeshActor],
    *args: Any,
    policy: FaultPolicy = FaultPolicy.OWNER,
    **kwargs: Any,
) -> SpawnedActor:
    """Start a process with one actor at a placement. Waits until the actor answers."""
    where: dict[str, Any] = {} if placement.host is None else {"on": placement.host}
    return await host.spawn(
        name, actor_class, *args, env=placement.env, policy=policy, **where, **kwargs
    )
