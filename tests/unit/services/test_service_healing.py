"""A service that replaces its dead: within a budget, and what callers see of it.

What replicas must have heard before they serve, while some of them die and come again.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fake_host import FakeActor, FakeHost, ask, turns, until
from healing_service import Events, healing, states, until_served, until_told

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, RemoteError, SessionLost
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.pool.replicas import RestartRules


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def events() -> Events:
    return []


async def test_a_replacement_is_set_up_in_order_before_it_gets_a_call(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1, load=("settings",))
    await pool.setup("pull", 6)
    await pool.setup("pull", 7)
    call = ask(pool, "request")
    await turns()
    host["w-0"].die("Killed(sig=9)")
    await until_served(pool, "w-0.2")
    await turns()
    assert host["w-0.2"].heard == [("load", "settings"), ("pull", 7), ("work", "request")]
    host["w-0.2"].finish("answer")
    assert await call == "answer"
    assert (states(pool), host.running) == ({"w-0.2": "ready"}, ["w-0.2"])
    assert (pool.restarts, pool.retried) == (1, 1)
    assert [event[:2] for event in events] == [("actor_restarted", "w-0.2")]
    assert events[0][3] == {
        "host": "localhost",
        "kind": "actor",
        "generation": 2,
        "replaces": "w-0",
    }


async def test_deaths_of_a_service_that_heals_are_its_own_business(
    host: FakeHost, events: Events
) -> None:
    await healing(host, events, attempts=1)
    assert [actor.policy for actor in host.started] == [FaultPolicy.OWNER] * 2


async def test_the_dead_stay_in_sight_until_another_serves_in_their_slot(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    host.gate = asyncio.Event()
    host["w-0"].die()
    await until(lambda: "w-0.2" in states(pool))
    assert states(pool) == {"w-0": "dead", "w-1": "ready", "w-0.2": "starting"}
    host.gate.set()
    await until_served(pool, "w-0.2")
    assert states(pool) == {"w-0.2": "ready", "w-1": "ready"}


async def test_calls_wait_while_the_only_replica_is_replaced(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1)
    host["w-0"].die()
    await turns()
    calls = [ask(pool, number) for number in range(3)]
    await until_served(pool, "w-0.2")
    await turns()
    assert host["w-0.2"].heard == [("work", number) for number in range(3)]
    for _ in calls:
        host["w-0.2"].finish()
        await turns()
    assert [await call for call in calls] == ["w-0.2"] * 3


async def test_a_slot_that_uses_up_its_budget_is_given_up_and_the_others_go_on(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    for name in ("w-0", "w-0.2", "w-0.3"):
        await until_served(pool, name)
        host[name].die("out of memory")
    await until_told(events, "actor_given_up")
    kind, actor, detail, fields = events[-1]
    assert (kind, actor) == ("actor_given_up", "w-0.3")
    assert detail.startswith("out of memory; given up after 2 restarts within 300 s")
    assert (fields["cause"], fields["class"]) == ("out of memory", "infrastructure")
    assert states(pool) == {"w-0.3": "dead", "w-1": "ready"}
    call = ask(pool)
    await turns()
    host["w-1"].finish("still here")
    assert await call == "still here"


async def test_where_none_is_left_every_caller_gets_one_clear_error(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1, restart=RestartRules(restarts=0))
    under_way, waiting = ask(pool), ask(pool)
    await turns()
    host["w-0"].die("out of memory")
    text = "w-0 died: out of memory; given up after 0 restarts within 300 s: .* raise supervision"
    for ended in (under_way, waiting, ask(pool), pool.setup("pull", 1), pool.fanout("pull", 1)):
        with pytest.raises(NoReplicaLeft, match=text):
            await ended
    with pytest.raises(NoReplicaLeft):
        pool.session().open()


async def test_a_start_that_fails_twice_in_the_same_way_is_given_up_at_once(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1, load=(), restart=RestartRules(50, backoff_s=1e-9))
    host.broken = ValueError("no key")
    call = ask(pool)
    await turns()
    host["w-0"].die()
    with pytest.raises(NoReplicaLeft, match=r"w-0 died: ValueError: no key; it failed in the same"):
        await call
    assert [actor.name for actor in host.started] == ["w-0", "w-0.2", "w-0.3"]
    assert (events[-1][0], events[-1][3]["class"]) == ("actor_given_up", "code")
    assert host.running == []


async def test_a_start_that_fails_by_accident_is_tried_again(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1, load=())
    host.broken = ConnectionResetError("cut")
    host["w-0"].die()
    await host.started_as("w-0.2")
    host.broken = None
    await until_served(pool, "w-0.3")
    assert (pool.restarts, host.running) == (1, ["w-0.3"])


async def test_a_session_that_finds_nobody_gets_the_replica_that_comes(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=2)
    host.gate = asyncio.Event()
    for name in ("w-0", "w-1"):
        host[name].die()
    await turns()
    async with pool.session("episode") as session:
        assert session.replica is None
        calls = [ask(session, number) for number in range(3)]
        await turns()
        host.gate.set()
        await until_served(pool, "w-0.2")
        await until_served(pool, "w-1.2")
        await turns()
        home = host[str(session.replica)]
        assert home.heard == [("work", number) for number in range(3)]
        home.die()
        for call in calls:
            with pytest.raises(SessionLost, match="episode"):
                await call
    assert [line["sessions"] for line in pool.status() if line["state"] == "ready"] == [0]


async def test_a_movable_session_waits_for_the_replica_that_comes(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=1)
    async with pool.session("episode", movable=True) as session:
        call = ask(session)
        await turns()
        host["w-0"].die()
        await until_served(pool, "w-0.2")
        await turns()
        host["w-0.2"].finish("again")
        assert await call == "again"
        assert (session.replica, session.moves) == ("w-0.2", 1)


def raised(actor: str, text: str) -> Exception:
    error = RuntimeError(text)
    error.__cause__ = RemoteError(actor, "work", "traceback")
    return error


async def test_with_retry_errors_a_call_that_raised_is_made_elsewhere(
    host: FakeHost, events: Events
) -> None:
    pool = (await healing(host, events, n=2)).options(retry_errors=True)
    call = ask(pool, "request")
    await turns()
    host["w-0"].held[0].fail(raised("w-0", "injected fault 3"))
    await turns()
    host["w-1"].finish("fine")
    assert await call == "fine"
    assert host["w-1"].heard == [("work", "request")]


async def test_an_error_that_comes_twice_is_the_answer(host: FakeHost, events: Events) -> None:
    pool = (await healing(host, events, n=2)).options(retry_errors=True, attempts=5)
    call = ask(pool)
    for name in ("w-0", "w-1"):
        await turns()
        host[name].held[0].fail(raised(name, "no such row"))
    with pytest.raises(RuntimeError, match="no such row"):
        await call
    assert pool.retried == 1


@pytest.mark.parametrize("held", ["gate", "slow"])
async def test_a_close_ends_a_healing_and_leaves_no_process(
    host: FakeHost, events: Events, held: str
) -> None:
    pool = await healing(host, events, n=2, load=())
    setattr(host, held, asyncio.Event())
    host["w-0"].die()
    await until(lambda: "w-0.2" in states(pool))
    await turns()
    await pool.close()
    await turns()
    assert host.running == []
    assert events == []


async def test_a_resize_counts_what_is_on_its_way_and_takes_the_dead_first(
    host: FakeHost, events: Events
) -> None:
    pool = await healing(host, events, n=3)
    host.gate = asyncio.Event()
    host["w-1"].die()
    await until(lambda: "w-1.2" in states(pool))
    await pool.resize(3)
    assert states(pool) == {
        "w-0": "ready",
        "w-1": "dead",
        "w-2": "ready",
        "w-1.2": "starting",
    }
    await pool.resize(2)
    await turns()
    assert states(pool) == {"w-0": "ready", "w-2": "ready"}
    host.gate.set()
    await turns()
    assert host.running == ["w-0", "w-2"]


async def test_a_resize_brings_back_what_was_given_up(host: FakeHost, events: Events) -> None:
    pool = await healing(host, events, n=2, restart=RestartRules(restarts=0))
    host["w-0"].die()
    await until_told(events, "actor_given_up")
    await pool.resize(2)
    assert states(pool) == {"w-0.2": "ready", "w-1": "ready"}


async def test_one_that_was_leaving_anyway_is_not_replaced(host: FakeHost, events: Events) -> None:
    pool = await healing(host, events, n=2)
    calls = [ask(pool), ask(pool)]
    await turns()
    shrinking = asyncio.ensure_future(pool.resize(1, drain_s=60))
    await turns()
    host["w-1"].die()
    await shrinking
    await turns()
    for _ in calls:
        host["w-0"].finish()
        await turns()
    await asyncio.gather(*calls)
    assert ([actor.name for actor in host.started], events) == (["w-0", "w-1"], [])


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
