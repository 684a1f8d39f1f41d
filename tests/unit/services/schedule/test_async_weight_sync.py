"""One sync beside the work at a time: what is waited for, what it costs, and how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from controller_world import others
from simulated_time import SimulatedLoop

from composer_mesh.services.controller import AsyncWeightSync
from composer_mesh.services.steps.ports import MayTrain

T = TypeVar("T")
HOLD_S, PULL_S = 1.0, 9.0
FIGURES = ("time/weight_sync_s", "time/weight_sync_total_s", "weights/hidden_share")


class Weights:
    """Syncs that take simulated time, one of which may fail, before or after it lets train."""

    def __init__(self, fails: tuple[int, str] = (0, "")) -> None:
        self.version, self.under_way, self.fails = 0, 0, fails
        self.served: list[tuple[float, int]] = []

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        self.version += 1
        self.under_way += 1
        assert self.under_way == 1
        version = self.version
        try:
            await self.stage("hold", HOLD_S)
            if on_snapshot is not None:
                on_snapshot()
            await self.stage("pull", PULL_S)
        finally:
            self.under_way -= 1
        return version

    async def stage(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.fails == (self.version, name):
            raise LookupError(name)

    def came(self, version: int) -> None:
        self.served.append((now(), version))


def now() -> float:
    return asyncio.get_running_loop().time()


def simulated(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


def figures(syncs: AsyncWeightSync) -> list[float | None]:
    found = syncs.metrics()
    assert list(found) == list(FIGURES)
    return list(found.values())


def test_a_sync_that_is_shorter_than_the_work_beside_it_is_not_waited_for() -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)

        async def loop() -> None:
            await syncs.begin()
            await asyncio.sleep(30)
            await syncs.on_snapshot()
            await syncs.finish()

        await syncs.guard(loop())
        assert now() == 30
        assert weights.served == [(HOLD_S + PULL_S, 1)]
        assert figures(syncs) == [0.0, 10.0, 1.0]
        assert figures(syncs) == [0.0, 0.0, None]

    simulated(run())


def test_what_the_loop_waits_for_a_sync_is_its_exposed_time() -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)

        async def loop() -> None:
            await syncs.begin()
            await syncs.on_snapshot()
            assert now() == HOLD_S
            await asyncio.sleep(4)
            await syncs.finish()
            assert now() == HOLD_S + PULL_S

        await syncs.guard(loop())
        assert figures(syncs) == [6.0, 10.0, 0.4]

    simulated(run())


def test_a_sync_that_is_waited_for_is_all_exposed_and_told_to_who_asked() -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)
        assert await syncs.guard(syncs.now()) == 1
        assert figures(syncs) == [10.0, 10.0, 0.0]
        assert weights.served == []

    simulated(run())


def test_the_next_sync_waits_for_the_one_under_way() -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)

        async def loop() -> int:
            await syncs.begin()
            await syncs.begin()
            return await syncs.now()

        assert await syncs.guard(loop()) == 3
        assert weights.served == [(10.0, 1), (20.0, 2)]
        assert now() == 30

    simulated(run())


def test_nobody_waits_where_no_sync_was_begun() -> None:
    async def run() -> None:
        syncs = AsyncWeightSync(Weights(), Weights().came)

        async def loop() -> None:
            await syncs.on_snapshot()
            await syncs.finish()

        await syncs.guard(loop())
        assert now() == 0

    simulated(run())


@pytest.mark.parametrize(("stage", "at"), [("hold", HOLD_S), ("pull", HOLD_S + PULL_S)])
@pytest.mark.parametrize("waits_for", ["nothing of it", "on_snapshot", "finish", "begin"])
def test_a_sync_that_fails_ends_the_work_with_its_failure_at_once(
    stage: str, at: float, waits_for: str
) -> None:
    async def run() -> None:
        weights = Weights(fails=(1, stage))
        syncs = AsyncWeightSync(weights, weights.came)
        went_on = False

        async def loop() -> None:
            nonlocal went_on
            await syncs.begin()
            if waits_for != "nothing of it":
                await getattr(syncs, waits_for)()
                went_on = True
            await asyncio.sleep(1000)

        with pytest.raises(LookupError, match=stage):
            await syncs.guard(loop())
        assert now() == at
        assert weights.served == []
        assert went_on == (waits_for == "on_snapshot" and stage == "pull")
        assert others() == set()

    simulated(run())


def test_what_happens_to_the_loop_when_a_version_comes_is_the_runs_failure_too() -> None:
    async def run() -> None:
        def refuse(version: int) -> None:
            raise ValueError(f"version {version}")

        syncs = AsyncWeightSync(Weights(), refuse)

        async def loop() -> None:
            await syncs.begin()
            await asyncio.sleep(1000)

        with pytest.raises(ValueError, match="version 1"):
            await syncs.guard(loop())

    simulated(run())


def test_work_that_fails_leaves_no_sync_under_way_and_fails_as_it_did() -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)

        async def loop() -> None:
            await syncs.begin()
            await asyncio.sleep(2)
            raise KeyError("a group")

        with pytest.raises(KeyError, match="a group"):
            await syncs.guard(loop())
        assert (weights.under_way, now()) == (0, 2)
        assert others() == set()

    simulated(run())


@pytest.mark.parametrize("moment", [0.0, 0.5, HOLD_S, 5.0, 20.0])
def test_work_that_is_cancelled_leaves_no_sync_under_way(moment: float) -> None:
    async def run() -> None:
        weights = Weights()
        syncs = AsyncWeightSync(weights, weights.came)

        async def loop() -> None:
            await syncs.begin()
            await syncs.begin()
            await asyncio.sleep(1000)

        running = asyncio.create_task(syncs.guard(loop()))
        await asyncio.sleep(moment)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert weights.under_way == 0
        assert others() == set()

    simulated(run())
