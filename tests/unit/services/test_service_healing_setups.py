"""What replicas must have heard before they serve, while some of them die and come again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fake_host import FakeActor, FakeHost, turns
from healing_service import Events, healing, states, until_served

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def events() -> Events:
    return []


async def test_a_setup_without_a_living_replica_is_for_the_one_that_comes(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1)
    await pool.setup("pull", 1)
    host.gate = asyncio.Event()
    host["w-0"].die()
    await turns()
    assert await pool.setup("pull", 2) == []
    host.gate.set()
    await until_served(pool, "w-0.2")
    assert host["w-0.2"].heard == [("pull", 2)]


async def test_a_replica_that_dies_during_a_setup_is_left_out_and_replaced(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    for actor in host.started:
        actor.slow = asyncio.Event()
    telling = asyncio.ensure_future(pool.setup("pull", 1))
    await turns()
    host["w-0"].broken = ActorDied("w-0", "Killed(sig=9)")
    for actor in host.started:
        assert actor.slow is not None
        actor.slow.set()
    assert await telling == ["w-1"]
    await until_served(pool, "w-0.2")
    assert host["w-0.2"].heard == [("pull", 1)]


async def test_a_replica_that_fails_at_what_it_did_before_is_replaced(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    await pool.setup("pull", 1)
    host["w-0"].broken = RuntimeError("injected")
    assert await pool.setup("pull", 2) == ["w-1"]
    assert host.told == [("w-0", "its pull failed: RuntimeError: injected")]
    await until_served(pool, "w-0.2")
    assert host["w-0.2"].heard == [("pull", 2)]


async def test_what_no_replica_ever_could_do_is_the_callers_error(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    host["w-0"].broken = ValueError("no key")
    with pytest.raises(ValueError, match="no key"):
        await pool.load("settings")
    assert states(pool) == {"w-0": "ready", "w-1": "ready"}


async def test_others_are_set_up_while_a_newcomer_still_loads(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2, load=("settings",))
    await pool.setup("pull", 1)
    host.slow = asyncio.Event()
    host["w-0"].die()
    newcomer = await host.started_as("w-0.2")
    await turns()
    assert newcomer.heard == [("load", "settings")]
    assert await pool.setup("pull", 2) == ["w-1"]
    host.slow.set()
    await until_served(pool, "w-0.2")
    assert newcomer.heard == [("load", "settings"), ("pull", 2)]


def publisher(name: str) -> Any:
    return cast(SpawnedActor, FakeActor(name, 1, None, asyncio.get_running_loop().create_future()))


async def test_the_end_of_a_publisher_ends_its_setup_and_costs_no_replica(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    trainer = publisher("trainer")
    await pool.broadcast_weights(trainer, "pull", 1)
    for actor in host.started:
        actor.slow = asyncio.Event()
    telling = asyncio.ensure_future(pool.broadcast_weights(trainer, "pull", 2))
    await turns()
    trainer.die("killed")
    with pytest.raises(ActorDied, match="trainer died: killed"):
        await telling
    assert states(pool) == {"w-0": "ready", "w-1": "ready"}


async def test_a_failure_that_the_end_of_a_publisher_explains_costs_no_replica(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1)
    trainer = publisher("trainer")
    await pool.broadcast_weights(trainer, "pull", 1)
    host["w-0"].broken = ConnectionResetError("cut")
    telling = asyncio.ensure_future(pool.broadcast_weights(trainer, "pull", 2))
    await turns()
    trainer.die("killed")  # known only after its reader has failed
    with pytest.raises(ActorDied, match="trainer died: killed"):
        await telling
    assert states(pool) == {"w-0": "ready"}


async def test_a_newcomer_waits_for_what_takes_the_place_of_a_dead_publisher(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1, load=("settings",))
    trainer = publisher("trainer")
    await pool.broadcast_weights(trainer, "pull", 1)
    trainer.die()
    host["w-0"].die()
    newcomer = await host.started_as("w-0.2")
    await turns()
    assert newcomer.heard == [("load", "settings")]
    assert await pool.broadcast_weights(publisher("trainer.2"), "pull", 1) == []
    await until_served(pool, "w-0.2")
    assert newcomer.heard == [("load", "settings"), ("pull", 1)]


async def test_what_is_remembered_replaces_what_the_others_were_told(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1)
    await pool.load("any port")
    pool.remember("load", "port 4711")
    host["w-0"].die()
    await until_served(pool, "w-0.2")
    assert host["w-0.2"].heard == [("load", "port 4711")]
