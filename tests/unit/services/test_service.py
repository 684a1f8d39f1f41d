"""A service's calls: bounded, in order, again elsewhere after a death; fakes for processes."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from fake_host import FakeHost, ask, serve, turns

from composer_mesh.mesh.supervision import (
    ActorDied,
    DeadlineExceeded,
    FaultPolicy,
    RemoteError,
    SessionLost,
)
from composer_mesh.services.pool.dispatch import ServiceBusy, ServiceClosed
from composer_mesh.services.service import ATTEMPTS, Service


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


def column(pool: Service, name: str) -> list[Any]:
    return [line[name] for line in pool.status()]


async def test_no_replica_ever_has_more_calls_than_it_may(host: FakeHost) -> None:
    pool = await serve(host, n=2, max_outstanding=3)
    calls = [ask(pool, number) for number in range(20)]
    most = 0
    while not all(call.done() for call in calls):
        await turns()
        most = max(most, *(len(actor.held) for actor in host.started))
        assert pool.waiting == max(0, sum(not call.done() for call in calls) - 6)
        for actor in host.started:
            if actor.held:
                actor.finish()
    assert most == 3
    assert column(pool, "calls") == [10, 10]


async def test_calls_that_wait_begin_in_the_order_in_which_they_came(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    calls = [ask(pool, number) for number in range(5)]
    for _ in calls:
        await turns()
        host["w-0"].finish()
    await asyncio.gather(*calls)
    assert host["w-0"].heard == [("work", number) for number in range(5)]


async def test_a_full_line_refuses_at_once_and_says_what_would_help(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1, queue=2)
    kept = [ask(pool, number) for number in range(3)]
    await turns()
    with pytest.raises(ServiceBusy, match=r"2 calls wait for a replica of w, but queue is 2: "):
        await pool.work(3)
    for _ in kept:
        host["w-0"].finish()
        await turns()
    assert all(call.done() for call in kept)
    assert host["w-0"].heard == [("work", 0), ("work", 1), ("work", 2)]


async def test_with_a_queue_of_none_a_call_is_served_or_refused(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1, queue=0)
    first = ask(pool)
    await turns()
    with pytest.raises(ServiceBusy):
        await pool.work()
    host["w-0"].finish("done")
    assert await first == "done"


async def test_a_cancelled_waiter_leaves_the_line_and_costs_nothing(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    first, second, third = [ask(pool, number) for number in range(3)]
    await turns()
    second.cancel()
    await turns()
    assert pool.waiting == 1
    host["w-0"].finish()
    await turns()
    assert host["w-0"].heard == [("work", 0), ("work", 2)]
    host["w-0"].finish("third")
    assert (await first, await third) == ("w-0", "third")
    assert column(pool, "outstanding") == [0]


@pytest.mark.parametrize("moment", range(8))
async def test_a_waiter_cancelled_at_any_moment_of_its_turn_gives_the_turn_on(
    host: FakeHost, moment: int
) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    first, second, third = [ask(pool, number) for number in range(3)]
    await turns()
    host["w-0"].finish()
    for _ in range(moment):
        await asyncio.sleep(0)
    second.cancel()
    await turns()
    while host["w-0"].held:
        host["w-0"].finish()
        await turns()
    assert second.cancelled()
    assert (await first, await third) == ("w-0", "w-0")
    assert (column(pool, "outstanding"), pool.waiting) == ([0], 0)


async def test_a_cancelled_call_counts_until_its_actor_is_done_with_it(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    first, second = ask(pool, 1), ask(pool, 2)
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert (column(pool, "outstanding"), pool.waiting) == ([1], 1)
    host["w-0"].finish()
    await turns()
    host["w-0"].finish("second")
    assert await second == "second"


async def test_the_calls_of_a_dead_replica_run_again_elsewhere_before_later_ones(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=2, max_outstanding=2)
    calls = [ask(pool, number) for number in range(6)]
    await turns()
    host["w-0"].die("Killed(sig=9)")
    await turns()
    assert (column(pool, "state"), pool.waiting) == (["dead", "ready"], 4)
    while host["w-1"].held:
        host["w-1"].finish()
        await turns()
    assert [await call for call in calls] == ["w-1"] * 6
    assert host["w-1"].heard == [("work", number) for number in (1, 3, 0, 2, 4, 5)]
    assert pool.retried == 2
    assert pool.status()[0]["reason"] == "Killed(sig=9)"
    assert host.told == [("w-0", "Killed(sig=9)")]
    assert host.running == ["w-1"]


async def test_a_death_that_no_call_met_is_noticed_too(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    host["w-1"].die()
    await turns()
    assert column(pool, "state") == ["ready", "dead"]
    calls = [ask(pool, number) for number in range(3)]
    await turns()
    assert len(host["w-0"].held) == 3
    for _ in calls:
        host["w-0"].finish()
        await turns()


async def test_a_call_that_kills_its_replicas_ends_after_its_attempts(host: FakeHost) -> None:
    pool = await serve(host, n=4)
    call = ask(pool, "poison")
    for _ in range(ATTEMPTS):
        await turns()
        next(actor for actor in host.started if actor.held).die()
    with pytest.raises(ActorDied, match="w-2 died: killed"):
        await call
    assert column(pool, "state") == ["dead", "dead", "dead", "ready"]
    assert pool.retried == ATTEMPTS - 1


async def test_without_a_living_replica_calls_and_waiters_hear_of_the_last_death(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    calls = [ask(pool), ask(pool)]
    await turns()
    host["w-0"].die("out of memory")
    for call in [*calls, ask(pool)]:
        with pytest.raises(ActorDied, match="w-0 died: out of memory"):
            await call
    with pytest.raises(ActorDied, match="out of memory"):
        await pool.fanout("pull")


async def test_with_one_attempt_a_death_is_the_callers_business(host: FakeHost) -> None:
    pool = await serve(host, n=2, attempts=1)
    assert [actor.policy for actor in host.started] == [FaultPolicy.ESCALATE] * 2
    call = ask(pool)
    await turns()
    host["w-0"].die()
    with pytest.raises(ActorDied, match="w-0"):
        await call
    with pytest.raises(ActorDied, match="w-0 died: killed"):
        await pool.fanout("pull")


async def test_a_tolerant_service_leaves_its_dead_out_of_a_fanout(host: FakeHost) -> None:
    pool = await serve(host, n=3)
    assert [actor.policy for actor in host.started] == [FaultPolicy.OWNER] * 3
    host["w-1"].die()
    await turns()
    assert await pool.fanout("pull") == ["w-0", "w-2"]
    other = await serve(FakeHost(), policy=FaultPolicy.ESCALATE)
    assert other._members._spec.policy is FaultPolicy.ESCALATE


async def test_a_call_that_was_admitted_once_is_not_refused_when_it_runs_again(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=2, max_outstanding=1, queue=0)
    calls = [ask(pool), ask(pool)]
    await turns()
    host["w-0"].die()
    await turns()
    assert pool.waiting == 1
    for _ in calls:
        host["w-1"].finish()
        await turns()
    assert [await call for call in calls] == ["w-1", "w-1"]


async def test_what_an_actor_raised_is_its_answer_also_when_it_dies_after_it(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=2)
    call = ask(pool)
    await turns()
    error = ActorDied("something-else", "gone")
    error.__cause__ = RemoteError("w-0", "work", "traceback")
    host["w-0"].held[0].fail(error)
    host["w-0"].death.set_result(ActorDied("w-0", "killed"))
    with pytest.raises(ActorDied, match="something-else"):
        await call
    assert (pool.retried, column(pool, "state")) == (0, ["dead", "ready"])


@pytest.mark.parametrize("error", [ValueError("its own"), ActorDied("w-0", "of another")])
async def test_an_actors_own_exception_is_never_retried(host: FakeHost, error: Exception) -> None:
    pool = await serve(host, n=2)
    error.__cause__ = RemoteError("w-0", "work", "traceback")
    call = ask(pool)
    await turns()
    host["w-0"].held[0].fail(error)
    with pytest.raises(type(error)):
        await call
    assert (pool.retried, column(pool, "state")) == (0, ["ready", "ready"])
    assert column(pool, "failures") == [1, 0]


async def test_a_missed_deadline_is_retried_only_where_the_caller_says_so(host: FakeHost) -> None:
    pool = await serve(host, n=2, deadline_s=9)
    call = ask(pool)
    await turns()
    host["w-0"].held[0].run_out()
    with pytest.raises(DeadlineExceeded, match="within 9 s"):
        await call
    again = pool.options(retry_timeouts=True, deadline_s=5, attempts=2)
    call = ask(again)  # w-1 has had fewer calls
    await turns()
    assert host["w-1"].held[0].deadline_s == 5
    host["w-1"].held[0].run_out()
    await turns()
    host["w-0"].held[0].run_out()
    with pytest.raises(DeadlineExceeded):
        await call
    assert pool.retried == again.retried == 1


async def test_a_retry_waits_for_another_replica_rather_than_for_the_same(host: FakeHost) -> None:
    pool = await serve(host, n=2, max_outstanding=1)
    one, two = ask(pool.options(retry_timeouts=True), "one"), ask(pool, "two")
    await turns()
    host["w-0"].held[0].run_out()
    await turns()
    assert (column(pool, "outstanding"), pool.waiting) == ([0, 1], 1)
    host["w-1"].finish()
    await turns()
    host["w-1"].finish("at last")
    assert (await one, await two) == ("at last", "w-1")


async def test_a_fanout_reaches_a_busy_replica_past_the_line(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    calls = [ask(pool, number) for number in range(2)]
    await turns()
    assert await pool.fanout("pull") == ["w-0"]
    assert pool.waiting == 1
    for _ in calls:
        host["w-0"].finish()
        await turns()


async def test_close_refuses_what_waits_and_what_comes_and_ends_what_runs(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    running, waiting = ask(pool.options(attempts=1)), ask(pool)
    await turns()
    await asyncio.gather(pool.close(), pool.close())
    for late in (running, waiting, ask(pool), ask(pool.options(attempts=1)), pool.fanout("pull")):
        with pytest.raises(ServiceClosed, match="w is closed and runs no calls"):
            await late
    assert host.running == []
    assert column(pool, "state") == ["stopped"]


async def test_close_gives_the_calls_under_way_the_time_that_it_is_told(host: FakeHost) -> None:
    pool = await serve(host, n=1, max_outstanding=1)
    running, waiting = ask(pool), ask(pool)
    await turns()
    closing = asyncio.ensure_future(pool.close(drain_s=60))
    await turns()
    with pytest.raises(ServiceClosed):
        await waiting
    assert host.running == ["w-0"]
    host["w-0"].finish("in time")
    assert await running == "in time"
    await closing
    assert host.running == []


async def test_an_endpoint_with_a_name_of_the_services_own_is_reached_by_call(
    host: FakeHost,
) -> None:
    pool = await serve(host, n=1)
    assert await pool.call("status") == "w-0"
    assert pool.status()[0]["name"] == "w-0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0, but a service has 1 or more"),
        ({"max_outstanding": 0}, "max_outstanding is 0"),
        ({"queue": -1}, "queue is -1"),
        ({"attempts": 0}, "attempts is 0, but a call is made once"),
        ({"deadline_s": 0.0}, "deadline_s is 0: pass seconds above 0"),
    ],
)
async def test_a_wrong_number_is_refused_before_a_process_starts(
    host: FakeHost, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await serve(host, **options)
    assert host.started == []


@pytest.mark.parametrize(
    "error", [ServiceBusy("w", 3, 2), ServiceClosed("w"), SessionLost("episode-7", "w-1", "killed")]
)
def test_the_errors_of_a_service_travel_whole(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))
