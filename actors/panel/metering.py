"""Asyncio interface of the ledger that batches many reservations into few disk writes.

A thread owns the ledger. Calls that arrive while it writes are executed in one transaction, so a
thousand calls wait for a few writes. `rollouts.budget` refuses requests; `provider.errors` defines
what a failed one is charged.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.provider.errors import ProviderBudgetError
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import BudgetRefusal, BudgetReport, Reservation, SettledTwice


@dataclass(slots=True)
class _Asked:
    """One call to the ledger, and the future that awaits its result."""

    work: Callable[[], Any]
    answer: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None

    def run(self) -> None:
        try:
            self.value = self.work()
        except (BudgetRefusal, SettledTwice, ValueError) as error:  # these errors changed nothing
            self.error = error

    def tell(self, failure: BaseException | None) -> None:
        if (error := failure or self.error) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(self.value)


class LedgerMeter:
    """A Meter over a ledger, which it closes. Belongs to one event loop.

    A cancelled caller leaves no reservation open: its reservation is settled at 0, because the
    request was never sent. A charge that cannot be written is counted in `unwritten`, and its
    reservation stays open. `run` holds the run's sums at the last write.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._loop = ledger, asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._asked: list[_Asked] = []
        self._writing: asyncio.Future[None] | None = None
        self._amounts: dict[int, int] = {}
        self.unwritten, self._closed = 0, False
        self.run = ledger.run_account()

    async def reserve(self, teacher: str, bound: int | None) -> int:
        made = self._ask(partial(self._ledger.reserve, teacher, bound))
        try:
            reservation: Reservation = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(self._never_sent)
            raise
        except (BudgetRefusal, StoreError) as error:
            raise ProviderBudgetError(teacher, str(error)) from None
        self._amounts[reservation.number] = reservation.amount
        return reservation.number

    async def settle(self, reservation: int, charge: int | None) -> int:
        amount = self._amounts.pop(reservation, 0)
        written = self._ask(partial(self._ledger.settle, reservation, charge))
        written.add_done_callback(_look_at)
        try:
            charged: int = await asyncio.shield(written)
        except StoreError:
            self.unwritten += 1
            return amount
        return charged

    async def report(self) -> BudgetReport:
        """Return the ledger's report on the run, including other processes."""
        report: BudgetReport = await asyncio.shield(self._ask(self._ledger.report))
        return report

    async def aclose(self) -> None:
        """Wait for pending writes, then close the ledger; idempotent."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
        if self._closed:
            return
        self._closed = True
        await self._loop.run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown(wait=False)

    def _ask(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        asked = _Asked(work, self._loop.create_future())
        self._asked.append(asked)
        if self._writing is None:
            self._write_next()
        return asked.answer

    def _write_next(self) -> None:
        batch, self._asked = self._asked, []
        self._writing = self._loop.run_in_executor(self._thread, self._write, batch)
        self._writing.add_done_callback(partial(self._written, batch))

    def _write(self, batch: list[_Asked]) -> None:
        """Run the complete batch in one transaction, on the ledger's thread."""
        try:
            with self._ledger.together():
                for asked in batch:
                    asked.run()
                self.run = self._ledger.run_account()
        except StoreError as error:
            for asked in batch:
                asked.error = error

    def _written(self, batch: list[_Asked], writing: asyncio.Future[None]) -> None:
        self._writing = None
        for asked in batch:
            asked.tell(writing.exception())
        if self._asked:
            self._write_next()

    def _never_sent(self, made: asyncio.Future[Reservation]) -> None:
        if not made.cancelled() and made.exception() is None:
            settle = partial(self._ledger.settle, made.result().number, 0)
            self._ask(settle).add_done_callback(_look_at)


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not answer.cancelled():
        answer.exception()
