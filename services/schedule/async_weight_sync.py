"""Weights on their way beside the steps: one sync at a time, and what the loop waited for it.

    loop    train | collect ..... may train? | train ............ | finish? | train
    sync           hold | copy ----> | pulls of all ----> served |           hold | copy ...

The order of a run is the controller's, what a sync does is its port's. A sync that fails ends the
work that it runs beside with its own failure.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.services.schedule.metrics import sync_metrics
from composer_mesh.services.steps.ports import WeightSync

T = TypeVar("T")


class AsyncWeightSync:
    """The syncs of one run. `served` is told of a version that came to be served beside a step."""

    def __init__(self, weights: WeightSync, served: Callable[[int], None]) -> None:
        self._weights, self._served = weights, served
        self._task: asyncio.Task[None] | None = None
        self._may_train = asyncio.Event()
        self._failed: asyncio.Future[BaseException] | None = None
        self._waited_s = self._took_s = 0.0

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that has syncs beside it, and that ends with the failure of one, at once.

        However it ends, no sync is under way afterwards.
        """
        self._failed = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._failed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._failed.result()
            return await task
        finally:
            await cancel_and_wait([task])
            await cancel_and_wait([self._task] if self._task else [])

    async def begin(self) -> None:
        """Let the newest version be served beside what follows. Waits for the sync before it."""
        await self.finish()
        self._may_train = asyncio.Event()
        self._task = asyncio.create_task(self._beside(self._may_train))

    async def now(self) -> int:
        """Let the newest version be served, and wait for it; returns it."""
        await self.finish()
        began = _now()
        version = await self._weights.sync()
        took_s = _now() - began
        self._took_s += took_s
        self._waited_s += took_s
        return version

    async def on_snapshot(self) -> None:
        """Wait until the next step may be trained beside the sync that is under way, if one is."""
        if self._task is not None:
            await self._wait(self._may_train.wait())

    async def finish(self) -> None:
        """Wait for the sync that is under way, if one is; raises its failure."""
        if self._task is not None:
            await self._wait(self._task)
            self._task = None

    def metrics(self) -> dict[str, float | None]:
        """What came of the syncs that have ended since the last call."""
        found = sync_metrics(self._waited_s, self._took_s)
        self._waited_s = self._took_s = 0.0
        return found

    async def _beside(self, on_snapshot: asyncio.Event) -> None:
        began = _now()
        try:
            version = await self._weights.sync(on_snapshot.set)
            self._took_s += _now() - began
            self._served(version)
        except Exception as error:
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(error)
            raise
        finally:
            on_snapshot.set()

    async def _wait(self, until: Awaitable[Any]) -> None:
        """Wait for something of the sync under way, or for its failure, and count the time."""
        assert self._task is not None
        began = _now()
        try:
            await until
            if self._task.done():
                self._task.result()
        finally:
            self._waited_s += _now() - began


def _now() -> float:
    return asyncio.get_running_loop().time()
