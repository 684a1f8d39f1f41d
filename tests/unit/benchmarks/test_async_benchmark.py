"""The simulated runs of `benchmarks/async.py`: the clock, the bound, and every group once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from async_world import Durations, World, play, simulate
from simulated_time import SimulatedLoop

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


def test_with_carried_groups_every_group_is_taken_once_and_no_old_token_is_trained() -> None:
    slow = replace(SHORT, slow_share=0.1)
    waiting, waited_s = play(slow, 1, 12, groups=(2, 2))
    carrying, took_s = play(slow, 1, 12, groups=(2, 2), carried=4, max_token_age=2)
    taken = [group for groups in carrying.taken for group in groups]
    assert sorted(taken) == [group for groups in waiting.taken for group in groups]
    assert taken != sorted(taken)
    assert took_s < waited_s
    assert max(metrics["lag/max"] for metrics in carrying.metrics) <= 2
    assert sum(metrics["tokens/aged"] for metrics in carrying.metrics) > 0
