"""Sessions: one replica gets all of their calls, and what happens when it goes; fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_host import FakeHost, serve, turns

from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, SessionLost
from composer_mesh.services.pool.dispatch import ServiceClosed
from composer_mesh.services.service import Service


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


def sessions(pool: Service) -> list[int]:
    return [line["sessions"] for line in pool.status()]


def work(session: Any, *args: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(session.work(*args))


async def test_all_calls_of_a_session_reach_one_replica_in_order(host: FakeHost) -> None:
    pool = await serve(host, n=3, max_outstanding=1)
    async with pool.session("episode-7") as session:
        calls = [work(session, number) for number in range(4)]
        other = asyncio.ensure_future(pool.work("other"))
        for _ in calls:
            await turns()
            assert len(host["w-0"].held) == 1
            host["w-0"].finish()
        assert await asyncio.gather(*calls) == ["w-0"] * 4
        assert session.replica == "w-0"
    assert host["w-0"].heard == [("work", number) for number in range(4)]
    host["w-1"].finish("beside it")
    assert await other == "beside it"


async def test_sessions_spread_over_the_replicas_before_they_call(host: FakeHost) -> None:
    pool = await serve(host, n=3)
    opened = [pool.session() for _ in range(7)]
    for session in opened:
        session.open()
    assert sessions(pool) == [3, 2, 2]
    for session in opened:
        session.close()
        session.close()
    assert sessions(pool) == [0, 0, 0]


async def test_a_session_is_lost_with_its_replica_and_stays_lost(host: FakeHost) -> None:
    pool = await serve(host, n=2, max_outstanding=1)
    async with pool.session("episode-7") as session:
        running, waiting = work(session), work(session)
        await turns()
        host["w-0"].die("Killed(sig=9)")
        for call in (running, waiting, work(session)):
            with pytest.raises(SessionLost, match="'episode-7' was lost with w-0: Killed") as lost:
                await call
            assert (lost.value.session, lost.value.replica) == ("episode-7", "w-0")
    assert host["w-1"].heard == []
    assert (sessions(pool), pool.retried) == ([0, 0], 0)


async def test_a_movable_session_goes_on_with_another_replica(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    async with pool.session(movable=True) as session:
        call = work(session, 1)
        await turns()
        host["w-0"].die()
        await turns()
        host["w-1"].finish("again")
        assert await call == "again"
        assert (session.replica, session.moves) == ("w-1", 1)
        assert sessions(pool) == [0, 1]
        host["w-1"].die()
        with pytest.raises(ActorDied, match="w-1"):
            await session.work(2)


async def test_a_draining_replica_keeps_its_sessions_and_takes_no_new_ones(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    old = [pool.session(f"s-{number}") for number in range(3)]  # two on the first, one on the other
    for session in old:
        session.open()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    new = pool.session("new")
    new.open()
    assert (old[1].replica, new.replica) == ("w-1", "w-0")
    call = work(old[1])
    await turns()
    host["w-1"].finish("still here")
    assert await call == "still here"
    assert not shrinking.done()
    old[1].close()
    await shrinking
    assert host.running == ["w-0"]


async def test_a_session_that_outlasts_the_drain_is_lost(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    first, second = pool.session("first"), pool.session("second")
    first.open()
    second.open()
    await pool.resize(1, drain_s=0.0)
    with pytest.raises(SessionLost, match="'second' was lost with w-1: a resize took it away"):
        await second.work()
    call = work(first)
    await turns()
    host["w-0"].finish("stayed")
    assert await call == "stayed"


async def test_a_movable_session_never_holds_a_drain_up(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    kept, moved = pool.session("kept"), pool.session("moved", movable=True)
    kept.open()
    moved.open()
    await pool.resize(1, drain_s=60)
    call = work(moved)
    await turns()
    host["w-0"].finish("moved")
    assert (await call, moved.replica, moved.moves) == ("moved", "w-0", 1)


async def test_a_movable_session_leaves_a_replica_that_drains_with_its_next_call(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=2)
    kept, moved = pool.session("kept"), pool.session("moved", movable=True)
    kept.open()
    moved.open()
    first = work(moved, 1)
    await turns()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    second = work(moved, 2)
    await turns()
    assert (host["w-1"].heard, host["w-0"].heard) == ([("work", 1)], [("work", 2)])
    host["w-1"].finish("stayed")
    await shrinking
    host["w-0"].finish("left")
    assert (await first, await second) == ("stayed", "left")


async def test_a_drain_ends_with_its_replica_though_a_session_is_open(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    for name in ("first", "second"):
        pool.session(name).open()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=600))
    await turns()
    host["w-1"].die()
    await turns()
    assert shrinking.done()


@pytest.mark.parametrize("movable", [False, True])
async def test_a_sessions_call_is_not_repeated_after_a_deadline(
    host: FakeHost, movable: bool
) -> None:
    pool = await serve(host, n=2)
    async with pool.options(retry_timeouts=True).session(movable=movable) as session:
        call = work(session)
        await turns()
        host["w-0"].held[0].run_out()
        with pytest.raises(DeadlineExceeded):
            await call
    assert pool.retried == 0


async def test_a_session_whose_replica_is_full_does_not_hold_others_up(host: FakeHost) -> None:
    pool = await serve(host, n=2, max_outstanding=1)
    async with pool.session() as session:
        mine = [work(session, number) for number in range(3)]
        others = [asyncio.ensure_future(pool.work("x")) for _ in range(2)]
        await turns()
        assert (host["w-1"].heard, pool.waiting) == ([("work", "x")], 3)
        host["w-1"].finish()
        await turns()
        assert (len(host["w-1"].held), pool.waiting) == (1, 2)
        for call in mine:
            host["w-0"].finish()
            await call
            await turns()
        host["w-1"].finish()
        await asyncio.gather(*others)


async def test_a_session_is_used_between_its_open_and_its_close(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    session = pool.session("s")
    with pytest.raises(RuntimeError, match="session 's' is not open: call inside of `async with`"):
        await session.work()
    async with session:
        with pytest.raises(ValueError, match="a session 's' is open already: choose another name"):
            pool.session("s").open()
        with pytest.raises(AttributeError, match="Worker has no endpoint 'sing'"):
            await session.sing()
    async with pool.session("s"):
        assert sessions(pool) == [1]
    await pool.close()
    with pytest.raises(ServiceClosed):
        pool.session("s").open()
