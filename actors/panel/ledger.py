"""The ledger of teacher costs: reservations and charges in SQLite, shared by processes.

`rollouts.budget` decides whether a request fits, in the transaction that writes its reservation.
Each transaction is synced to disk before a request is sent, so a power cut loses no money that may
have been spent. Synchronous; `metering` is the asyncio interface.

Whether the process that owns open ledger reservations is still alive.

A process is identified by its id and start time, because ids are reused. Only processes of this
machine are found.

Asyncio interface of the ledger that batches many reservations into few disk writes.

A thread owns the ledger. Calls that arrive while it writes are executed in one transaction, so a
thousand calls wait for a few writes. `rollouts.budget` refuses requests; `provider.errors` defines
what a failed one is charged.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.provider.errors import ProviderBudgetError
from composer_mesh.actors.sqlite_file import FileKind, SqliteFile, StoreError
from composer_mesh.mesh.processes import is_alive, start_ticks
from composer_mesh.rollouts.budget import (
    Account,
    BudgetRefusal,
    BudgetReport,
    BudgetRules,
    LargestExcess,
    Reservation,
    SettledTwice,
    Taken,
)
from composer_mesh.rollouts.money import LARGEST_CHARGE


def started_at(pid: int) -> str:
    """Return a process's boot id and start time; "" if the system does not report it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    ticks = start_ticks(pid)
    return f"{boot} {ticks}" if ticks else ""


def owner_lives(pid: int, started: str) -> bool:
    """Return whether exactly this process is still running."""
    return is_alive(pid) and started_at(pid) == started


LEDGER = FileKind(
    purpose="keep the ledger of what teachers cost",
    repair="name another file with budget.ledger of [replay] or [judges], or move this one away",
    application_id=0x434D4C31,
    version=1,
    tables=(
        """CREATE TABLE owners (
            id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, started TEXT NOT NULL,
            closed INTEGER NOT NULL DEFAULT 0)""",
        """CREATE TABLE accounts (
            run TEXT NOT NULL, teacher TEXT NOT NULL, day TEXT NOT NULL,
            spent INTEGER NOT NULL, reserved INTEGER NOT NULL,
            requests INTEGER NOT NULL, overruns INTEGER NOT NULL,
            PRIMARY KEY (run, teacher, day)) WITHOUT ROWID""",
        "CREATE INDEX accounts_of_a_day ON accounts (day)",
        """CREATE TABLE reservations (
            id INTEGER PRIMARY KEY, run TEXT NOT NULL, teacher TEXT NOT NULL, day TEXT NOT NULL,
            owner INTEGER NOT NULL REFERENCES owners (id),
            bound INTEGER NOT NULL, amount INTEGER NOT NULL, charge INTEGER)""",
        "CREATE INDEX open_reservations ON reservations (run, owner) WHERE charge IS NULL",
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
        owner: tuple[int, str] | None = None,
    ) -> None:
        self.rules, self.run, self._day = rules, run, day
        self._file, self._closed = SqliteFile(path, LEDGER), False
        pid, started = owner or (os.getpid(), started_at(os.getpid()))
        with self._file.transaction() as rows:
            self._owner = rows.execute(
                "INSERT INTO owners (pid, started) VALUES (?, ?)", (pid, started)
            ).lastrowid

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block as one transaction: written once, or not at all."""
        with self._file.transaction():
            yield

    def reserve(self, teacher: str, bound: int | None) -> Reservation:
        """Reserve a request's maximum cost; raises BudgetRefusal if it must not be sent.

        A refusal changes nothing.
        """
        bound = self.rules.bound(bound)
        with self._file.transaction() as rows:
            day = self._day()
            amount = self._raise_of(rows, teacher).amount(bound)
            self.rules.check(teacher, self._taken(rows, teacher, day), amount)
            rows.execute(
                "INSERT INTO accounts VALUES (?, ?, ?, 0, ?, 1, 0) ON CONFLICT DO UPDATE "
                "SET reserved = reserved + excluded.reserved, requests = requests + 1",
                (self.run, teacher, day, amount),
            )
            made = rows.execute(
                "INSERT INTO reservations (run, teacher, day, owner, bound, amount) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (self.run, teacher, day, self._owner, bound, amount),
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
        with self._file.transaction() as rows:
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

    def add_earlier(self, teacher: str, spent: int, requests: int) -> None:
        """Add what the run spent before this ledger was created, counted as today's; call once."""
        with self._file.transaction() as rows:
            values = (self.run, teacher, self._day(), spent, requests)
            rows.execute("INSERT INTO accounts VALUES (?, ?, ?, ?, 0, ?, 0)", values)

    def run_account(self) -> Account:
        """Return the run's current sums."""
        with self._file.reading() as rows:
            sums = rows.execute(f"SELECT {SUMS} FROM accounts WHERE run = ?", (self.run,))
            return Account(*sums.fetchone())

    def report(self) -> BudgetReport:
        """Return spent and reserved amounts: this run's by teacher, and all runs' by day."""
        with self._file.transaction() as rows:
            by_teacher = rows.execute(
                f"SELECT teacher, {SUMS} FROM accounts WHERE run = ? GROUP BY teacher", (self.run,)
            )
            teachers = {name: Account(*sums) for name, *sums in by_teacher}
            by_day = rows.execute(f"SELECT day, {SUMS} FROM accounts GROUP BY day")
            days = {day: Account(*sums) for day, *sums in by_day}
            return BudgetReport(
                sum(teachers.values(), Account()), teachers, days, self._abandoned(rows)
            )

    def close(self) -> None:
        """Close the file; idempotent. Open reservations stay counted."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._file.transaction() as rows:
                rows.execute("UPDATE owners SET closed = 1 WHERE id = ?", (self._owner,))
        finally:
            self._file.close()

    def _taken(
        self, rows: sqlite3.Connection, teacher: str, day: str, run: str | None = None
    ) -> Taken:
        run = run or self.run

        def total(where: str, *values: str) -> int:
            return int(rows.execute(f"{TAKEN} {where}", values).fetchone()[0])

        return Taken(
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

    def _abandoned(self, rows: sqlite3.Connection) -> int:
        left_open = rows.execute(
            "SELECT pid, started, closed, SUM(amount) FROM reservations JOIN owners "
            "ON owners.id = owner WHERE run = ? AND charge IS NULL GROUP BY owner",
            (self.run,),
        )
        return sum(
            amount
            for pid, started, closed, amount in left_open
            if closed or not owner_lives(pid, started)
        )


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
