"""A service whose size changes while it runs; fakes for processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_host import FakeHost, ask, serve, turns

from composer_mesh.mesh.supervision import ActorDied, RemoteError
from composer_mesh.services.pool import replicas
from composer_mesh.services.pool.dispatch import ServiceClosed
from composer_mesh.services.service import Service


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


def states(pool: Service) -> dict[str, str]:
    return {line["name"]: line["state"] for line in pool.status()}


async def test_a_replica_is_loaded_before_it_gets_its_first_call(host: FakeHost) -> None:
    pool = await serve(host, n=1, load=("settings",), max_outstanding=1)
    calls = [ask(pool, number) for number in range(3)]
    await turns()
    await pool.resize(2)
    await turns()
    assert [actor.heard[0] for actor in host.started] == [("load", "settings")] * 2
    assert host["w-1"].heard == [("load", "settings"), ("work", 1)]
    for actor in (host["w-0"], host["w-1"], host["w-0"]):
        actor.finish()
        await turns()
    assert all(call.done() for call in calls)


async def test_those_that_come_later_hear_the_last_of_each_setup_in_order(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    assert await pool.load("a") == ["w-0", "w-1"]
    await pool.setup("pull", 1)
    await pool.setup("pull", 2)
    await pool.fanout("status")
    await pool.resize(3)
    assert host["w-2"].heard == [("load", "a"), ("pull", 2)]
    assert host["w-0"].heard == [("load", "a"), ("pull", 1), ("pull", 2), ("status",)]
    await pool.load("b")
    await pool.resize(4)
    assert host["w-3"].heard == [("pull", 2), ("load", "b")]


async def test_a_setup_that_failed_is_not_asked_of_later_ones(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    host["w-0"].broken = ValueError("no such weights")
    with pytest.raises(ValueError, match="no such weights"):
        await pool.setup("pull", 1)
    await pool.resize(2)
    assert host["w-1"].heard == []


async def test_a_growth_that_fails_leaves_the_service_as_it_was(host: FakeHost) -> None:
    pool = await serve(host, n=1, load=("settings",))
    host.broken = ValueError("no key")
    with pytest.raises(ValueError, match="no key"):
        await pool.resize(3)
    assert states(pool) == {"w-0": "ready"}
    assert host.running == ["w-0"]
    host.broken = None
    await pool.resize(2)
    assert states(pool) == {"w-0": "ready", "w-1.2": "ready"}


async def test_a_load_that_fails_at_the_start_leaves_no_process(host: FakeHost) -> None:
    host.broken = ValueError("no key")
    with pytest.raises(ValueError, match="no key"):
        await serve(host, n=2, load=("settings",))
    assert host.running == []


async def test_the_least_busy_leaves_after_its_calls_and_gets_nothing_new(host: FakeHost) -> None:
    pool = await serve(host, n=3)
    calls = [ask(pool, number) for number in range(5)]  # two, two, one
    await turns()
    shrinking = asyncio.ensure_future(pool.resize(2))
    await turns()
    assert states(pool) == {"w-0": "ready", "w-1": "ready", "w-2": "draining"}
    assert len(pool) == 2
    calls += [ask(pool, number) for number in range(5, 7)]
    await turns()
    assert [len(actor.held) for actor in host.started] == [3, 3, 1]
    assert not shrinking.done()
    host["w-2"].finish("the last word")
    await shrinking
    assert await calls[2] == "the last word"
    assert host.running == ["w-0", "w-1"]
    assert states(pool) == {"w-0": "ready", "w-1": "ready"}


async def test_what_is_at_work_after_the_drain_time_runs_again_elsewhere(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    one, two = ask(pool, "one"), ask(pool, "two")
    await turns()
    await pool.resize(1, drain_s=0.0)
    await turns()
    assert [call.args for call in host["w-0"].held] == [("one",), ("two",)]
    host["w-0"].finish()
    await turns()
    host["w-0"].finish("again")
    assert (await one, await two, pool.retried) == ("w-0", "again", 1)


async def test_a_call_for_a_certain_replica_ends_with_it(host: FakeHost) -> None:
    pool = await serve(host, n=2, max_outstanding=1)
    calls = [asyncio.ensure_future(pool.on(1, "work", number)) for number in range(2)]
    busy = ask(pool), ask(pool)
    await turns()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    host["w-1"].finish("first")
    await turns()
    assert await calls[0] == "first"
    host["w-1"].die()
    with pytest.raises(ActorDied, match="w-1 died: killed"):
        await calls[1]
    await shrinking
    for _ in busy:
        host["w-0"].finish()
        await turns()
    with pytest.raises(IndexError, match="replica 1 of w, which has 0 to 0"):
        await pool.on(1, "work")


async def test_a_resize_to_the_same_size_replaces_the_dead(host: FakeHost) -> None:
    pool = await serve(host, n=3, load=("settings",))
    host["w-1"].die()
    await turns()
    await pool.resize(3)
    assert states(pool) == {"w-0": "ready", "w-1.2": "ready", "w-2": "ready"}
    assert [line["generation"] for line in pool.status()] == [1, 2, 1]
    assert host["w-1.2"].heard == [("load", "settings")]
    host["w-1.2"].die()
    await turns()
    await pool.resize(3)
    assert states(pool) == {"w-0": "ready", "w-1.3": "ready", "w-2": "ready"}


async def test_a_call_waits_for_a_replica_that_is_coming(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    host["w-0"].die()
    await turns()
    host.gate = asyncio.Event()
    growing = asyncio.ensure_future(pool.resize(1))
    await turns()
    call = ask(pool)
    await turns()
    assert (pool.waiting, states(pool)) == (1, {"w-0.2": "starting"})
    host.gate.set()
    await growing
    await turns()
    host["w-0.2"].finish("here")
    assert await call == "here"


async def test_a_call_that_waited_for_a_replica_hears_when_none_comes(host: FakeHost) -> None:
    pool = await serve(host, n=1, load=())
    host["w-0"].die("oom")
    await turns()
    host.gate, host.broken = asyncio.Event(), ValueError("no key")
    growing = asyncio.ensure_future(pool.resize(1))
    await turns()
    call = ask(pool)
    await turns()
    host.gate.set()
    with pytest.raises(ValueError, match="no key"):
        await growing
    with pytest.raises(ActorDied, match="w-0 died: oom"):
        await call


async def test_resizes_at_the_same_time_happen_one_after_the_other(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    await asyncio.gather(pool.resize(4), pool.resize(2), pool.resize(3))
    assert len(pool) == 3
    assert len(host.running) == 3
    assert [actor.name for actor in host.started] == ["w-0", "w-1", "w-2", "w-3", "w-2.2"]


@pytest.mark.parametrize("held", ["gate", "slow"])
async def test_a_setup_beside_a_growth_reaches_the_newcomer_once(host: FakeHost, held: str) -> None:
    pool = await serve(host, n=1, load=("a",))
    held_back = asyncio.Event()
    setattr(host, held, held_back)
    growing = asyncio.ensure_future(pool.resize(2))
    await turns()
    telling = asyncio.ensure_future(pool.setup("pull", 7))
    await turns()
    held_back.set()
    await asyncio.gather(growing, telling)
    assert host["w-1"].heard == [("load", "a"), ("pull", 7)]


@pytest.mark.parametrize("to", [1, 4])
async def test_a_close_ends_a_resize_and_leaves_no_process(host: FakeHost, to: int) -> None:
    pool = await serve(host, n=2)
    calls = [ask(pool), ask(pool)]
    host.gate = asyncio.Event()
    await turns()
    resizing = asyncio.ensure_future(pool.resize(to, drain_s=60))
    await turns()
    await pool.close()
    for ended in (resizing, *calls, pool.resize(3)):
        with pytest.raises(ServiceClosed):
            await ended
    assert host.running == []


async def test_a_cancelled_growth_leaves_no_process(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    host.gate = asyncio.Event()
    growing = asyncio.ensure_future(pool.resize(3))
    await turns()
    growing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growing
    assert (states(pool), host.running) == ({"w-0": "ready"}, ["w-0"])


async def test_a_drain_goes_on_when_nobody_waits_for_it(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    calls: list[Any] = [ask(pool), ask(pool)]
    await turns()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    shrinking.cancel()
    await turns()
    assert states(pool) == {"w-0": "ready", "w-1": "draining"}
    host["w-1"].finish()
    await turns()
    assert host.running == ["w-0"]
    host["w-0"].finish()
    await asyncio.gather(*calls)


async def test_a_service_keeps_at_least_one_replica(host: FakeHost) -> None:
    pool = await serve(host, n=1)
    with pytest.raises(ValueError, match="n is 0, but a service has 1 or more: raise n"):
        await pool.resize(0)


async def test_a_drain_waits_for_what_others_have_at_a_replica(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    host["w-1"].in_use = 1
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    assert states(pool)["w-1"] == "draining"
    host["w-1"].in_use = 0
    await shrinking
    assert host.running == ["w-0"]


@pytest.mark.parametrize(
    "error", [OSError("cannot be described"), RemoteError("w-1", "describe", "cannot be sent")]
)
async def test_a_failed_look_at_a_replica_neither_ends_its_drain_nor_its_sessions(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(replicas, "IN_USE_EVERY_S", 0.0)
    pool = await serve(host, n=2)
    host["w-1"].in_use = 1
    host["w-1"].describe_error = error
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    assert states(pool)["w-1"] == "draining"
    host["w-1"].describe_error = None
    await turns()
    assert states(pool)["w-1"] == "draining"
    host["w-1"].in_use = 0
    await shrinking
    assert host.running == ["w-0"]


async def test_a_replica_that_only_fails_to_be_described_is_stopped_at_the_limit_of_its_drain(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=2)
    host["w-1"].describe_error = OSError("cannot be described")
    await pool.resize(1, drain_s=0.3)
    assert (states(pool), host.running) == ({"w-0": "ready"}, ["w-0"])
