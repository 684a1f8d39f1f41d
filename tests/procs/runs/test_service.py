"""A service in real processes: the least busy replica answers, and the dead lose no call."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from counting_actors import CountingActor
from echo_actors import Bad, EchoActor

from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, SessionLost, Supervisor
from composer_mesh.services import service
from composer_mesh.services.pool.dispatch import ServiceClosed
from composer_mesh.services.pool.replicas import Replica

Events = list[tuple[str, str, str]]


def kill(replica: Replica, sign: signal.Signals = signal.SIGKILL) -> None:
    assert replica.actor is not None
    os.kill(replica.actor.pid, sign)


async def noticed(replica: Replica) -> None:
    """Wait until the supervisor knows of a death."""
    assert replica.actor is not None
    assert replica.actor.death is not None
    await asyncio.wait_for(asyncio.shield(replica.actor.death), 60)


def states(pool: service.Service) -> list[str]:
    return [line["state"] for line in pool.status()]


async def test_three_lines_of_a_script_are_enough() -> None:
    pool = await service.spawn(EchoActor, n=2)
    assert await pool.say("hello") == "echo hello"
    pids = [line["pid"] for line in pool.status()]
    await pool.close()
    assert not any(map(is_alive, pids))
    assert states(pool) == ["stopped", "stopped"]


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
    with pytest.raises(AttributeError, match="no endpoint 'sing': it has close_calls, describe"):
        await pool.sing("la")


async def test_a_dead_replica_is_named_and_marked(host: MeshHost, supervisor: Supervisor) -> None:
    pool = await service.spawn(EchoActor, n=2, host=host, name="generator", attempts=1)
    kill(pool.replicas[1])
    with pytest.raises(ActorDied, match="generator-1 died"):
        await pool.on(1, "hold")
    assert states(pool) == ["ready", "dead"]
    assert await pool.say("still") == "echo still"
    died = await supervisor.failure
    assert isinstance(died, ActorDied)
    assert died.actor == "generator-1"


async def test_a_service_that_cannot_start_leaves_no_replica(host: MeshHost) -> None:
    with pytest.raises(ActorDied, match="told to fail"):
        await service.spawn(EchoActor, n=2, host=host, name="echo", fail=True)
    assert host.actors == []


async def test_a_replica_killed_mid_call_loses_no_call_and_ends_no_run(
    host: MeshHost, supervisor: Supervisor, events: Events
) -> None:
    pool = await service.spawn(EchoActor, n=3, host=host, name="echo", max_outstanding=4)
    held = [asyncio.ensure_future(pool.hold()) for _ in range(20)]
    await pool.fanout("pid")  # a round trip later every call that may is under way
    victim, *others = [pool.replicas[place] for place in (1, 0, 2)]
    assert (victim.outstanding, pool.waiting) == (4, 8)
    kill(victim)
    await noticed(victim)
    assert await pool.fanout("release") == [None, None]
    answered = await asyncio.gather(*held)
    assert set(answered) == {replica.actor.pid for replica in others if replica.actor}
    assert states(pool) == ["ready", "dead", "ready"]
    assert re.search(r"Killed\(sig=9\)|has ended", pool.status()[1]["reason"])
    assert pool.retried == 4
    assert [event[:2] for event in events] == [("actor_died", "echo-1")]
    assert not supervisor.failure.done()


async def test_under_load_every_call_is_answered_while_replicas_die_and_come(
    host: MeshHost,
) -> None:
    pool = await service.spawn(
        CountingActor, n=3, load=("go",), host=host, name="w", max_outstanding=8
    )
    calls = [asyncio.ensure_future(pool.work(number)) for number in range(600)]
    await calls[50]
    kill(pool.replicas[0])
    await calls[300]
    await pool.resize(4)
    answers: list[tuple[int, int]] = await asyncio.gather(*calls)
    assert [number for number, _ in answers] == list(range(600))
    assert max(await pool.fanout("peak")) <= 8
    await pool.resize(3)
    assert states(pool) == ["ready"] * 3
    assert len({line["pid"] for line in pool.status()}) == 3
    assert len(host.actors) == 3


def halt(replica: Replica) -> None:
    """Stop a process; returns when none of its threads runs any more."""
    kill(replica, signal.SIGSTOP)
    assert replica.actor is not None
    threads = Path(f"/proc/{replica.actor.pid}/task")
    while any(") T " not in stat.read_text() for stat in threads.glob("*/stat")):
        pass


async def test_a_replica_that_hangs_is_passed_over_where_the_caller_allows(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, n=2, host=host, name="echo")
    halt(pool.replicas[0])
    try:
        impatient = pool.options(deadline_s=6.0)
        with pytest.raises(DeadlineExceeded, match=r"echo-0\.say gave no answer within 6 s"):
            await impatient.on(0, "say", "hello")
        again = impatient.options(retry_timeouts=True)
        assert await asyncio.gather(*(again.say(t) for t in "ab")) == ["echo a", "echo b"]
        assert pool.retried == 1
    finally:
        kill(pool.replicas[0], signal.SIGCONT)


async def test_an_endpoints_own_exception_arrives_as_itself_and_once(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, n=2, host=host, name="echo")
    with pytest.raises(Bad):
        await pool.fail("bad")
    assert [line["calls"] for line in pool.status()] == [1, 0]
    assert [line["failures"] for line in pool.status()] == [1, 0]


async def test_a_service_grows_and_shrinks_while_it_serves(host: MeshHost) -> None:
    pool = await service.spawn(CountingActor, n=1, load=("go",), host=host, name="w")
    calls = [asyncio.ensure_future(pool.work(number)) for number in range(100)]
    await pool.resize(3)
    calls += [asyncio.ensure_future(pool.work(number)) for number in range(100, 200)]
    pids = {line["pid"] for line in pool.status()}
    await calls[150]
    await pool.resize(1)
    answers: list[Any] = await asyncio.gather(*calls)
    assert [number for number, _ in answers] == list(range(200))
    assert {pid for _, pid in answers} == pids
    assert [pid for pid in pids if is_alive(pid)] == [pool.status()[0]["pid"]]
    assert len(host.actors) == 1


async def test_a_session_speaks_to_one_replica_until_it_dies(host: MeshHost) -> None:
    pool = await service.spawn(CountingActor, n=2, host=host, name="w")
    async with pool.session("a") as one, pool.session("b") as two:
        assert one.replica != two.replica
        for count in (1, 2, 3):
            for session in (one, two):
                assert len(await session.say(session.name, "hello")) == count
        home = next(replica for replica in pool.replicas if replica.name == one.replica)
        kill(home)
        with pytest.raises(SessionLost, match="session 'a' was lost with w-0"):
            await one.say("a", "are you there?")
        assert len(await two.say("b", "and you?")) == 4


async def test_close_ends_the_calls_under_way_and_leaves_no_process(host: MeshHost) -> None:
    pool = await service.spawn(EchoActor, n=2, host=host, name="echo", max_outstanding=1)
    held = [asyncio.ensure_future(pool.hold()) for _ in range(3)]
    pids = await pool.fanout("pid")
    await pool.close()
    for call in held:
        with pytest.raises(ServiceClosed, match="echo is closed"):
            await call
    assert not any(map(is_alive, pids))
    assert host.actors == []
