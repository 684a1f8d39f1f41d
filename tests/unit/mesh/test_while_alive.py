"""Work beside an actor whose memory it reads ends with that actor, or with its own result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.hosts.host import LocalHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied

LONG_S = 60.0


def actor() -> SpawnedActor:
    death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
    nothing: Any = None
    return SpawnedActor("trainer", "trainer", nothing, 1, MeshActor, nothing, LocalHost(), death)


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


async def test_an_error_that_a_death_explains_is_that_death() -> None:
    one = actor()
    working = asyncio.ensure_future(while_alive(one, fail(RuntimeError("gone")), LONG_S))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not working.done()
    die(one)
    with pytest.raises(ActorDied, match="trainer died"):
        await working


async def test_an_error_that_no_death_explains_is_told_after_a_while() -> None:
    with pytest.raises(RuntimeError, match="torn"):
        await while_alive(actor(), fail(RuntimeError("torn")), 0.01)


async def test_another_actors_death_is_told_at_once() -> None:
    with pytest.raises(ActorDied, match="teacher died"):
        await asyncio.wait_for(while_alive(actor(), fail(ActorDied("teacher", "x")), LONG_S), 10)


async def test_without_a_while_to_wait_an_error_is_told_at_once() -> None:
    one = actor()
    with pytest.raises(RuntimeError, match="torn"):
        await asyncio.wait_for(while_alive(one, fail(RuntimeError("torn"))), 10)
