"""The cost of one query: each attempt is reserved before it is sent and settled afterwards.

A query may be cancelled at any time, also while it reserves or settles: none of its reservations
stays open, and none is settled twice.

Port of the provider client to a budget.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from composer_mesh.actors.provider.errors import ProviderBudgetError


class Meter(Protocol):
    """Reserves the maximum cost of each request before it is sent, and settles its actual cost."""

    async def reserve(self, teacher: str, bound: int | None) -> int:
        """Reserve nano-dollars; raises ProviderBudgetError if the request must not be sent.

        The bound None stands for an unknown price. Returns the reservation's number.
        """

    async def settle(self, reservation: int, charge: int | None) -> int:
        """Settle a reservation once; None charges all of it.

        Returns what counts: a charge above the reservation only as far as the ceilings allow.
        """


T = TypeVar("T")


class BackgroundWrites:
    """Background writes that complete even if their caller is cancelled; on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; it completes even if a caller that shields it is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait until all tasks have completed."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class Bill:
    """The attempts of one query: `charged` nano-dollars so far, `known` if every cost is known.

    `bound` is the most that one attempt can cost at the teacher's prices, None if those are
    unknown. A response that states more is charged the bound, and the highest such claim is
    `overcharge`. Without a meter it only sums the costs that responses report.
    """

    def __init__(
        self, meter: Meter | None, teacher: str, bound: int | None, books: BackgroundWrites
    ) -> None:
        self._meter, self._teacher, self._books = meter, teacher, books
        self.charged, self.known = 0, True
        self.bound, self.overcharge = bound, 0

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator["Attempt"]:
        """Context manager of one request, which sets its charge; by default the full reservation.

        Raises ProviderBudgetError, and does not run the block, if nothing may be reserved.
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
        reserving = self._books.begin(_reserving(self._meter, self._teacher, self.bound))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            self._books.begin(_given_back(self._meter, reserving))
            raise

    async def _settle(self, reservation: int | None, charge: int | None) -> None:
        believed = self._believed(charge)
        settled = believed or 0
        if self._meter is not None and reservation is not None:
            settling = self._books.begin(_settling(self._meter, reservation, believed))
            settled = await asyncio.shield(settling)
        self.charged += settled
        self.known &= self.bound == 0 or settled == charge

    def _believed(self, charge: int | None) -> int | None:
        """Return a stated charge up to the bound: more is not what the request can cost."""
        if charge is None or self.bound is None or charge <= self.bound:
            return charge
        self.overcharge = max(self.overcharge, charge)
        return self.bound


class Attempt:
    """One request; `charge` is None while its cost is unknown."""

    charge: int | None = None


async def _reserving(meter: Meter, teacher: str, bound: int | None) -> int:
    return await meter.reserve(teacher, bound)


async def _settling(meter: Meter, reservation: int, charge: int | None) -> int:
    return await meter.settle(reservation, charge)


async def _given_back(meter: Meter, reserving: asyncio.Task[int]) -> None:
    """Settle the reservation of a request that was never sent at 0."""
    try:
        reservation = await reserving
    except ProviderBudgetError:
        return
    await meter.settle(reservation, 0)
