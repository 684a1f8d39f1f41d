"""Weight syncs that run concurrently with training steps: one at a time, with their wait times.

    loop    train | collect ..... may train? | train ............ | finish? | train
    sync           hold | copy ----> | pulls of all ----> served |           hold | copy ...

The controller decides the order of a run; the `WeightSync` port does the transfer. A sync that
fails ends the work that it runs concurrently with, raising its own failure there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from composer_mesh.mesh.waiting import cancel_and_wait, unless
from composer_mesh.services.schedule.metrics import sync_metrics
from composer_mesh.services.steps.ports import WeightSync

T = TypeVar("T")


class AsyncWeightSync:
    """Run the weight syncs of one run. `served` is called with each version served by a background
    sync."""

    def __init__(self, weights: WeightSync, served: Callable[[int], None]) -> None:
        self._weights, self._served = weights, served
        self._task: asyncio.Task[None] | None = None
        self._may_train = asyncio.Event()
        self._failed: asyncio.Future[BaseException] | None = None
        self._waited_s = self._took_s = 0.0

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` with syncs in the background; raise a sync's failure at once if one fails.

        However it ends, no sync is under way afterwards.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            return await unless(work, [self._failed], self._failed.result)
        finally:
            await cancel_and_wait([self._task] if self._task else [])

    async def begin(self) -> None:
        """Start a background sync of the newest version. Waits for the previous sync first."""
        await self.finish()
        self._may_train = asyncio.Event()
        self._task = asyncio.create_task(self._sync_in_background(self._may_train))

    async def now(self) -> int:
        """Sync the newest version, wait until it is served, and return it."""
        await self.finish()
        began = _now()
        version = await self._weights.sync()
        took_s = _now() - began
        self._took_s += took_s
        self._waited_s += took_s
        return version

    async def on_snapshot(self) -> None:
        """Wait until the running sync, if any, has its snapshot: the next step may then train."""
        if self._task is not None:
            await self._wait(self._may_train.wait())

    async def finish(self) -> None:
        """Wait for the running sync, if any, to finish; raises its failure."""
        if self._task is not None:
            await self._wait(self._task)
            self._task = None

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of the syncs that ended since the last call."""
        found = sync_metrics(self._waited_s, self._took_s)
        self._waited_s = self._took_s = 0.0
        return found

    async def _sync_in_background(self, on_snapshot: asyncio.Event) -> None:
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
        """Wait for `until` or for the running sync's failure, and count the time waited."""
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
