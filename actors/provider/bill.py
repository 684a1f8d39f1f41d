"""What one question costs: each attempt is reserved before it is sent and settled after it.

A question may be cancelled at any moment, also while it reserves or settles: no reservation stays
open for it, and none is settled twice. What a request may cost is for others to say.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from composer_mesh.actors.provider.errors import ProviderBudgetError
from composer_mesh.actors.provider.meter import Meter

T = TypeVar("T")


class Bookkeeping:
    """What must be written although nobody waits for it any more. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start it; it ends even if the caller is cancelled while it waits behind a shield."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait until all is written."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class Bill:
    """The attempts of one question. `charged` nano-dollars so far; `known` while all are told.

    Without a meter it only adds up what responses tell.
    """

    def __init__(
        self, meter: Meter | None, teacher: str, bound: int | None, books: Bookkeeping
    ) -> None:
        self._meter, self._teacher, self._bound, self._books = meter, teacher, bound, books
        self.charged, self.known = 0, True

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator["Attempt"]:
        """One request: the block sends it and notes its charge, the whole reservation until then.

        Raises ProviderBudgetError, and does not run the block, where nothing may be reserved.
        """
        reservation = await self._reserve()
        attempt = Attempt()
        try:
            yield attempt
        finally:
            await self._settle(reservation, attempt.charge)

    async def _reserve(self) -> int | None:
        if self._meter is None:
            return None
        reserving = self._books.begin(_reserving(self._meter, self._teacher, self._bound))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            self._books.begin(_given_back(self._meter, reserving))
            raise

    async def _settle(self, reservation: int | None, charge: int | None) -> None:
        self.known &= charge is not None or self._bound == 0
        if self._meter is None or reservation is None:
            self.charged += charge or 0
            return
        settling = self._books.begin(_settling(self._meter, reservation, charge))
        self.charged += await asyncio.shield(settling)


class Attempt:
    """One request; `charge` None: nobody knows what it cost."""

    charge: int | None = None


async def _reserving(meter: Meter, teacher: str, bound: int | None) -> int:
    return await meter.reserve(teacher, bound)


async def _settling(meter: Meter, reservation: int, charge: int | None) -> int:
    return await meter.settle(reservation, charge)


async def _given_back(meter: Meter, reserving: asyncio.Task[int]) -> None:
    """Settle at nothing what was reserved for a request that is never sent."""
    try:
        reservation = await reserving
    except ProviderBudgetError:
        return
    await meter.settle(reservation, 0)
