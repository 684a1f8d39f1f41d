"""Work beside an actor whose memory it reads ends with that actor, or with its own result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from composer_mesh.mesh.hosts.host import LocalHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied

LONG_S = 60.0


def actor() -> SpawnedActor:
    death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
    nothing: Any = None
    return SpawnedActor("trainer", "trainer", nothing, 1, nothing, LocalHost(), death)


def die(one: SpawnedActor) -> None:
    assert one.death is not None
    one.death.set_result(ActorDied(one.name, "Killed(sig=9)"))


async def fail(error: Exception) -> None:
    raise error


async def test_work_that_goes_on_ends_with_the_actor() -> None:
    one = actor()
    working = asyncio.ensure_future(while_alive(one, asyncio.sleep(LONG_S)))
    await asyncio.sleep(0)
    die(one)
    with pytest.raises(ActorDied, match="trainer died"):
        await working


async def test_an_error_of_the_work_is_raised_at_once() -> None:
    one = actor()
    with pytest.raises(RuntimeError, match="torn"):
        await asyncio.wait_for(while_alive(one, fail(RuntimeError("torn"))), 10)
