"""A service: several processes behind one name, the least busy one answers."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from echo_actors import EchoActor

from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services import service


async def test_three_lines_of_a_script_are_enough() -> None:
    pool = await service.spawn(EchoActor, n=2)
    assert await pool.say("hello") == "echo hello"
    pids = [line["pid"] for line in pool.status()]
    await pool.close()
    assert not any(map(is_alive, pids))
    assert [line["state"] for line in pool.status()] == ["stopped", "stopped"]


async def test_calls_go_to_the_replica_with_the_fewest_under_way(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, n=3, host=host, name="echo")
    held = [asyncio.ensure_future(pool.hold()) for _ in range(5)]
    await asyncio.sleep(0)  # one turn of the loop: every call has begun, in its order
    assert [line["outstanding"] for line in pool.status()] == [2, 2, 1]
    await pool.on(2, "release")
    assert await held[2] == pool.replicas[2].actor.pid
    assert [line["outstanding"] for line in pool.status()] == [2, 2, 0]
    assert await pool.pid() == pool.replicas[2].actor.pid
    await pool.fanout("release")
    assert len(set(await asyncio.gather(*held))) == 3


async def test_fanout_asks_every_replica_in_order_and_on_asks_one(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, "hi", n=2, host=host, name="echo", env={"X": "1"})
    pids = [line["pid"] for line in pool.status()]
    assert await pool.fanout("pid") == pids
    assert await pool.on(1, "pid") == pids[1]
    assert await pool.fanout("say", text="you") == ["hi you", "hi you"]
    with pytest.raises(IndexError, match="replica 2 of echo"):
        await pool.on(2, "pid")
    with pytest.raises(AttributeError, match="no endpoint 'sing': it has describe, fail"):
        await pool.sing("la")


async def test_a_dead_replica_is_named_and_marked(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, n=2, host=host, name="generator")
    os.kill(pool.replicas[1].actor.pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match="generator-1 died"):
        await pool.on(1, "hold")
    assert [line["state"] for line in pool.status()] == ["ready", "dead"]
    assert await pool.say("still") == "echo still"


async def test_a_service_that_cannot_start_leaves_no_replica(host: MeshHost) -> None:
    with pytest.raises(ActorDied, match="told to fail"):
        await service.spawn(EchoActor, n=2, host=host, name="echo", fail=True)
    assert host.actors == []
