"""Work that needs the same processes, one beside another, and repairs of them that run alone.

    attempt   ------x                    ----------> result        the fault
    attempt   --------x interrupted      ------> result            tried again too
    repair            ======== alone ====

A fault is met by whoever needs the processes, and mended once. What a fault is, and what mends it,
is the caller's business.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")
Mend = Callable[[], Coroutine[Any, Any, None]]


class Attempts:
    """Belongs to one event loop. What could not be mended ends everything else that is tried."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._repairs = 0
        self._failure: Exception | None = None

    async def insist(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        mend: Callable[[Exception], Coroutine[Any, Any, None]],
    ) -> T:
        """The result of some work, tried again after each repair. Waits for a repair under way.

        Work that has ended is done, and work that was interrupted never was: what it changes here,
        it has to change after its last `await`.
        """
        while True:
            async with self._alone:
                if self._failure is not None:
                    raise self._failure
                task, before = asyncio.ensure_future(work()), self._repairs
                self._under_way.add(task)
            if await self._interrupted(task):
                continue
            error = task.exception()
            if error is None:
                return task.result()
            if not isinstance(error, Exception):
                raise error
            found = error
            await self._repair(lambda: mend(found), before)  # noqa: B023  awaited at once

    async def repair(self, mend: Mend) -> None:
        """Mend what nobody may have met yet. Waits for a repair under way.

        Raises what an earlier repair has failed with: it is why nothing can be mended any more.
        """
        await self._repair(mend, None)

    async def interrupt(self) -> None:
        """Void what is under way, from within a repair; after it, all of that is tried again."""
        self._repairs += 1
        voided, self._under_way = self._under_way, set()
        await cancel_and_wait(voided)

    async def _repair(self, mend: Mend, before: int | None) -> None:
        """Mend, unless there was a repair since there had been `before` of them."""
        async with self._alone:
            if self._failure is not None:
                raise self._failure
            if before is not None and before != self._repairs:
                return
            try:
                await mend()
            except Exception as error:
                self._failure = error
                raise

    async def _interrupted(self, task: asyncio.Task[Any]) -> bool:
        """Wait for the end of an attempt; whether it was a repair that ended it."""
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await cancel_and_wait([task])
            raise
        finally:
            ours = task not in self._under_way
            self._under_way.discard(task)
        return ours and task.cancelled()
