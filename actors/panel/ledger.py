"""The ledger of teacher costs: reservations and charges in SQLite, shared by processes.

`rollouts.budget` decides whether a request fits, in the transaction that writes its reservation.
Each transaction is synced to disk before a request is sent, so a power cut loses no money that may
have been spent. `rollouts.budget` refuses requests; `provider.errors` defines what a failed one is
charged.

`Ledger` is synchronous; `LedgerMeter` is its asyncio interface, in which many calls wait for one
write.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer_mesh.actors.provider.errors import ProviderBudgetError
from composer_mesh.actors.sqlite_file import FileKind, GroupCommit, SqliteFile, StoreError
from composer_mesh.rollouts.budget import (
    LARGEST_CHARGE,
    Account,
    BudgetRefusal,
    BudgetReport,
    BudgetRules,
    LargestExcess,
    OverBudget,
    Reservation,
    SettledTwice,
    TakenAmounts,
)

T = TypeVar("T")


LEDGER = FileKind(
    purpose="keep the ledger of what teachers cost",
    repair="name another file with budget.ledger of [replay] or [judges], or move this one away",
    application_id=0x434D4C31,
    version=1,
    tables=(
        """CREATE TABLE accounts (
            run TEXT NOT NULL, teacher TEXT NOT NULL, day TEXT NOT NULL,
            spent INTEGER NOT NULL, reserved INTEGER NOT NULL,
            requests INTEGER NOT NULL, overruns INTEGER NOT NULL,
            PRIMARY KEY (run, teacher, day)) WITHOUT ROWID""",
        "CREATE INDEX accounts_of_a_day ON accounts (day)",
        """CREATE TABLE reservations (
            id INTEGER PRIMARY KEY, run TEXT NOT NULL, teacher TEXT NOT NULL, day TEXT NOT NULL,
            bound INTEGER NOT NULL, amount INTEGER NOT NULL, charge INTEGER)""",
        """CREATE TABLE raises (
            run TEXT NOT NULL, teacher TEXT NOT NULL,
            millionths INTEGER NOT NULL, least INTEGER NOT NULL,
            PRIMARY KEY (run, teacher)) WITHOUT ROWID""",
    ),
    synchronous="FULL",
)
SUMS = ", ".join(
    f"COALESCE(SUM({column}), 0)" for column in ("spent", "reserved", "requests", "overruns")
)
TAKEN = "SELECT COALESCE(SUM(spent + reserved), 0) FROM accounts WHERE"


def utc_day() -> str:
    """Return today's UTC date, as daily ceilings count it."""
    return datetime.now(UTC).date().isoformat()


class Ledger:
    """One process's connection to the ledger; `run` is the account of its requests.

    Without a path the ledger is in memory, private to this object, under the same rules.
    Reservations that a process leaves open stay counted, because their requests may have been
    charged.
    """

    def __init__(
        self,
        path: Path | None,
        rules: BudgetRules,
        run: str,
        *,
        day: Callable[[], str] = utc_day,
    ) -> None:
        self.rules, self.run, self._day = rules, run, day
        self.file = SqliteFile(path, LEDGER)

    def reserve(self, teacher: str, bound: int | None) -> Reservation:
        """Reserve a request's maximum cost; raises BudgetRefusal if it must not be sent.

        A refusal changes nothing.
        """
        bound = self.rules.bound(bound)
        with self.file.transaction() as rows:
            day = self._day()
            amount = self._raise_of(rows, teacher).amount(bound)
            self.rules.check(teacher, self._taken(rows, teacher, day), amount)
            rows.execute(
                "INSERT INTO accounts VALUES (?, ?, ?, 0, ?, 1, 0) ON CONFLICT DO UPDATE "
                "SET reserved = reserved + excluded.reserved, requests = requests + 1",
                (self.run, teacher, day, amount),
            )
            made = rows.execute(
                "INSERT INTO reservations (run, teacher, day, bound, amount) "
                "VALUES (?, ?, ?, ?, ?)",
                (self.run, teacher, day, bound, amount),
            )
            return Reservation(int(made.lastrowid or 0), amount)

    def settle(self, reservation: int, charge: int | None) -> int:
        """Charge a finished request; None, for an unknown cost, charges its full reservation.

        A charge above the reservation is an overrun: it raises the teacher's later reservations,
        and counts only as far as the ceilings have space, so nothing that a provider states passes
        one. Returns what counts. Raises SettledTwice, and changes nothing, if it was settled
        before.
        """
        if charge is not None and charge < 0:
            raise ValueError(f"charge is {charge}, below 0: a request cannot earn money")
        with self.file.transaction() as rows:
            run, teacher, day, bound, amount = self._open(rows, reservation)
            claimed = amount if charge is None else min(charge, LARGEST_CHARGE)
            charge = claimed
            if claimed > amount:
                taken = self._taken(rows, teacher, day, run)
                charge = min(claimed, amount + self.rules.free(teacher, taken))
            rows.execute("UPDATE reservations SET charge = ? WHERE id = ?", (charge, reservation))
            rows.execute(
                "UPDATE accounts SET spent = spent + ?, reserved = reserved - ?, "
                "overruns = overruns + ? WHERE run = ? AND teacher = ? AND day = ?",
                (charge, amount, int(claimed > amount), run, teacher, day),
            )
            if claimed > amount:
                self._keep_raise(rows, run, teacher, bound, claimed)
            return charge

    def run_account(self) -> Account:
        """Return the run's current sums."""
        with self.file.reading() as rows:
            sums = rows.execute(f"SELECT {SUMS} FROM accounts WHERE run = ?", (self.run,))
            return Account(*sums.fetchone())

    def report(self) -> BudgetReport:
        """Return this run's spent and reserved amounts, in total and by teacher."""
        with self.file.reading() as rows:
            by_teacher = rows.execute(
                f"SELECT teacher, {SUMS} FROM accounts WHERE run = ? GROUP BY teacher", (self.run,)
            )
            teachers = {name: Account(*sums) for name, *sums in by_teacher}
        return BudgetReport(sum(teachers.values(), Account()), teachers)

    def close(self) -> None:
        """Close the file; idempotent. Open reservations stay counted."""
        self.file.close()

    def _taken(
        self, rows: sqlite3.Connection, teacher: str, day: str, run: str | None = None
    ) -> TakenAmounts:
        run = run or self.run

        def total(where: str, *values: str) -> int:
            return int(rows.execute(f"{TAKEN} {where}", values).fetchone()[0])

        return TakenAmounts(
            run=total("run = ?", run),
            teacher=total("run = ? AND teacher = ?", run, teacher),
            day=total("day = ?", day) if self.rules.of_day is not None else 0,
            requests=self.run_account().requests if self.rules.requests is not None else 0,
        )

    def _open(self, rows: sqlite3.Connection, reservation: int) -> tuple[str, str, str, int, int]:
        found = rows.execute(
            "SELECT run, teacher, day, bound, amount, charge FROM reservations WHERE id = ?",
            (reservation,),
        ).fetchone()
        if found is None:
            raise ValueError(f"reservation {reservation} was never made: settle what reserve gave")
        run, teacher, day, bound, amount, charge = found
        if charge is not None:
            raise SettledTwice(reservation)
        return run, teacher, day, bound, amount

    def _raise_of(
        self, rows: sqlite3.Connection, teacher: str, run: str | None = None
    ) -> LargestExcess:
        found = rows.execute(
            "SELECT millionths, least FROM raises WHERE run = ? AND teacher = ?",
            (run or self.run, teacher),
        ).fetchone()
        return LargestExcess(*found) if found else LargestExcess()

    def _keep_raise(
        self, rows: sqlite3.Connection, run: str, teacher: str, bound: int, charge: int
    ) -> None:
        raised = self._raise_of(rows, teacher, run).after(bound, charge)
        rows.execute(
            "INSERT OR REPLACE INTO raises VALUES (?, ?, ?, ?)",
            (run, teacher, raised.millionths, raised.least),
        )


class LedgerMeter:
    """A Meter over a ledger, which it closes. Belongs to one event loop.

    A cancelled caller leaves no reservation open: its reservation is settled at 0, because the
    request was never sent; a settlement is written in any case. A charge that cannot be written is
    counted in `unwritten`, and its reservation stays open. `run` holds the run's sums at the last
    write. With `give_up`, a reservation that does not fit waits until it is set while others are
    open, because a request usually costs far less than it reserves.
    """

    def __init__(self, ledger: Ledger, give_up: asyncio.Event | None = None) -> None:
        self._ledger, self._writes = ledger, GroupCommit(ledger.file)
        self._give_up, self._settled = give_up, asyncio.Event()
        self._pending: set[asyncio.Future[Any]] = set()
        self._amounts: dict[int, int] = {}
        self.unwritten, self.run = 0, ledger.run_account()

    async def reserve(self, teacher: str, bound: int | None) -> int:
        while True:
            made = self._start(partial(self._ledger.reserve, teacher, bound))
            try:
                reservation = await asyncio.shield(made)
            except asyncio.CancelledError:
                made.add_done_callback(self._never_sent)
                raise
            except (BudgetRefusal, StoreError) as error:
                if isinstance(error, OverBudget) and await self._one_settled():
                    continue
                raise ProviderBudgetError(teacher, str(error)) from None
            self._amounts[reservation.number] = reservation.amount
            return reservation.number

    async def _one_settled(self) -> bool:
        """Wait until an open reservation is settled; return False where none is waited for."""
        if self._give_up is None or self._give_up.is_set() or not self._amounts:
            return False
        await self._settled.wait()
        return not self._give_up.is_set()

    def wake(self) -> None:
        """Let waiting reservations look again: one was settled, or `give_up` is set."""
        self._settled.set()
        self._settled = asyncio.Event()

    async def settle(self, reservation: int, charge: int | None) -> int:
        try:
            return await asyncio.shield(
                self._start(partial(self._ledger.settle, reservation, charge))
            )
        except StoreError:
            self.unwritten += 1
            return self._amounts.get(reservation, 0)
        finally:
            self._amounts.pop(reservation, None)
            self.wake()

    async def report(self) -> BudgetReport:
        """Return the ledger's report on the run, including other processes."""
        return await asyncio.shield(self._start(self._ledger.report))

    async def aclose(self) -> None:
        """Wait for pending writes, then close the ledger; idempotent."""
        while self._pending:
            await asyncio.wait(self._pending)
        await asyncio.to_thread(self._writes.close)
        await asyncio.to_thread(self._ledger.close)

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        def job(_: sqlite3.Connection) -> T:
            value = work()
            self.run = self._ledger.run_account()
            return value

        return self._kept(self._writes.start(job))

    def _kept(self, pending: asyncio.Future[T]) -> asyncio.Future[T]:
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)
        return pending

    def _never_sent(self, made: asyncio.Future[Reservation]) -> None:
        if made.exception() is None:
            self._kept(asyncio.ensure_future(self.settle(made.result().number, 0)))
