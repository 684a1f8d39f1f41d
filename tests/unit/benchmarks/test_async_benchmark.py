"""The simulated runs of `benchmarks/async.py`: the clock, the bound, and every group once."""

from __future__ import annotations

import asyncio

import pytest
from async_orders import windowed
from async_world import Durations, World, play, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_time import SimulatedLoop

from composer_mesh.services.controller import Controller

SHORT = Durations(median=10, turns=2, busy=8, train=15)


def simulated(work: object) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(work)  # type: ignore[arg-type]


def test_sleeps_take_simulated_time_and_end_in_its_order() -> None:
    async def run() -> None:
        log: list[tuple[float, float]] = []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 0.5, 86400.0)))
        assert log == [(0.5, 0.5), (3600, 3600), (86400, 86400)]

    simulated(run())


def test_a_wait_that_nobody_will_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a deadlock"):
        simulated(asyncio.Event().wait())


def test_requests_share_the_engine_and_stand_still_while_it_takes_weights() -> None:
    async def run() -> None:
        world = World(Durations(busy=2), seed=0)
        one = asyncio.create_task(world.engine.run(10))
        two = asyncio.create_task(world.engine.run(10))
        await asyncio.sleep(5)
        await world.engine.pause(100, version=7)
        assert await one == await two == [0, 7]
        assert asyncio.get_running_loop().time() == pytest.approx(120)  # half as fast, and 100 s

    simulated(run())


def test_a_drained_engine_takes_weights_when_its_last_request_has_ended() -> None:
    async def run() -> None:
        engine = World(Durations(busy=1e9), seed=0).engine
        one = asyncio.create_task(engine.run(10))
        await asyncio.sleep(1)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(1)
        two = asyncio.create_task(engine.run(10))
        await draining
        assert asyncio.get_running_loop().time() == pytest.approx(10)
        await engine.pause(5, version=1)
        engine.reopen()
        assert (await one, await two) == ([0, 0], [1, 1])
        assert asyncio.get_running_loop().time() == pytest.approx(25)

    simulated(run())


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(SHORT, 2, 6, seed=1) == simulate(SHORT, 2, 6, seed=1)
    assert simulate(SHORT, 2, 6, seed=1) != simulate(SHORT, 2, 6, seed=2)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_product_takes_groups_in_their_order_within_the_bound(max_lag: int) -> None:
    world, _ = play(SHORT, max_lag, 6, groups=(2, 2))
    assert world.taken == [[2 * step, 2 * step + 1] for step in range(6)]
    assert max(metrics["lag/max"] for metrics in world.metrics) <= max_lag


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    prompts=st.integers(1, 4),
    max_lag=st.integers(2, 4),
    keeps=st.booleans(),
    data=st.data(),
)
def test_groups_taken_as_they_finish_are_trained_once_and_within_the_bound_of_their_window(
    seed: int, prompts: int, max_lag: int, keeps: bool, data: st.DataObject
) -> None:
    span = data.draw(st.integers(1, (max_lag - 1) * prompts + 1))
    order = windowed(span, keeps)
    world, _ = play(SHORT, max_lag, 6, groups=(prompts, 2), seed=seed, controller=order)
    taken = [group for step in world.taken for group in step]
    assert len(set(taken)) == len(taken) == 6 * prompts
    most = max_lag if keeps else ((max_lag + 1) * prompts + span - 2) // prompts
    assert max(metrics["lag/max"] for metrics in world.metrics) <= most
    for place, group in enumerate(taken):
        assert group < min(set(range(6 * prompts)) - set(taken[:place])) + span


def test_a_window_of_one_is_the_order_of_entry() -> None:
    strict, _ = play(SHORT, 2, 6, groups=(2, 2), controller=Controller)
    narrow, _ = play(SHORT, 2, 6, groups=(2, 2), controller=windowed(1))
    assert narrow.taken == strict.taken


def test_a_window_in_which_a_step_could_not_be_filled_is_refused() -> None:
    with pytest.raises(ValueError, match="span is 4 but at most 3 keeps the lag below 3"):
        play(SHORT, 2, 6, groups=(2, 2), controller=windowed(4))
