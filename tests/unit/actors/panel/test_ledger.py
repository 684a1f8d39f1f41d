"""The ledger: no interleaving overspends, nothing is settled twice, nothing is forgotten."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import (
    Account,
    BudgetRules,
    OverBudget,
    SettledTwice,
    ceiling,
    dollars,
)

OpenLedger = Callable[..., Ledger]
RULES = BudgetRules(usd=dollars(1000), per_teacher={"a": dollars(600)}, usd_per_day=dollars(700))


@pytest.fixture
def open_ledger(tmp_path: Path) -> Iterator[OpenLedger]:
    opened: list[Ledger] = []

    def open_one(usd_nano: int = 1000, run: str = "run", **options: object) -> Ledger:
        rules = BudgetRules(usd=dollars(usd_nano), **options.pop("rules", {}))  # type: ignore[arg-type]
        opened.append(Ledger(tmp_path / "ledger.sqlite", rules, run, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()


class Ring:
    """Two processes' connections to one file, as they are without the processes."""

    def __init__(self, folder: Path) -> None:
        self.day = 0
        self.open: list[tuple[int, int]] = []
        self.paid: list[int] = []
        self._path = folder / "ledger.sqlite"
        self.ledgers = [self._opened(), self._opened()]

    def _opened(self) -> Ledger:
        return Ledger(self._path, RULES, "run", day=self._today)

    def restart(self, at: int) -> None:
        self.ledgers[at].close()
        self.ledgers[at] = self._opened()

    def midnight(self) -> None:
        self.day += 1

    def _today(self) -> str:
        return f"2026-01-{self.day + 1:02}"

    def reserve(self, at: int, teacher: str, bound: int) -> None:
        try:
            made = self.ledgers[at].reserve(teacher, bound)
        except OverBudget:
            return
        self.open.append((made.number, made.amount))

    def settle(self, at: int, which: int, share: float | None) -> None:
        if self.open:
            number, amount = self.open.pop(which % len(self.open))
            charge = None if share is None else int(amount * share)
            self.paid.append(self.ledgers[at].settle(number, charge))
            charge = amount if charge is None else charge
            assert min(charge, amount) <= self.paid[-1] <= charge

    def check(self) -> None:
        for ledger in self.ledgers:
            report = ledger.report()
            assert report.run.spent == sum(self.paid)
            assert report.run.reserved == sum(amount for _, amount in self.open)
            assert report.run == sum(report.teachers.values(), Account())
            assert taken(report.run) <= ceiling(RULES.usd)
            assert taken(report.teachers.get("a", Account())) <= ceiling(RULES.per_teacher["a"])
            assert all(sums <= ceiling(RULES.usd_per_day or 0) for sums in days(ledger).values())


def days(ledger: Ledger) -> dict[str, int]:
    """What is spent and reserved of each day, over all runs."""
    with ledger.file.reading() as rows:
        return dict(rows.execute("SELECT day, SUM(spent + reserved) FROM accounts GROUP BY day"))


def taken(account: Account) -> int:
    return account.spent + account.reserved


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("reserve"), st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 400)
        ),
        st.tuples(
            st.just("settle"),
            st.integers(0, 1),
            st.integers(0, 99),
            st.none() | st.floats(0, 1e9),
        ),
        st.tuples(st.just("restart"), st.integers(0, 1)),
        st.just(("midnight",)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_no_interleaving_of_reserve_settle_and_restart_overspends(
    steps: list[tuple[object, ...]],
) -> None:
    with TemporaryDirectory() as folder:
        ring = Ring(Path(folder))
        for name, *values in steps:
            getattr(ring, str(name))(*values)
            ring.check()
        for ledger in ring.ledgers:
            ledger.close()


@pytest.mark.parametrize("limit", [0, 1, 990, 1000, 5000])
def test_threads_over_two_connections_spend_up_to_the_ceiling_and_no_further(
    open_ledger: OpenLedger, limit: int
) -> None:
    ledgers = [open_ledger(limit), open_ledger(limit)]

    def ask(number: int) -> int:
        ledger = ledgers[number % 2]
        try:
            made = ledger.reserve("a", 10)
        except OverBudget:
            return 0
        return ledger.settle(made.number, 10)

    with ThreadPoolExecutor(8) as threads:
        paid = sum(threads.map(ask, range(200)))
    assert paid == min(limit // 10, 200) * 10
    assert ledgers[0].report().run.spent == paid


def test_a_reservation_is_settled_once(open_ledger: OpenLedger) -> None:
    one, two = open_ledger(), open_ledger()
    made = one.reserve("a", 100)
    assert two.settle(made.number, 30) == 30
    with pytest.raises(SettledTwice, match=f"reservation {made.number} is settled"):
        one.settle(made.number, 30)
    assert one.report().run == Account(spent=30, reserved=0, requests=1)
    with pytest.raises(ValueError, match="reservation 99 was never made"):
        one.settle(99, 1)
    with pytest.raises(ValueError, match="charge is -1"):
        one.settle(made.number, -1)


def test_sums_survive_a_restart(open_ledger: OpenLedger) -> None:
    first = open_ledger()
    first.settle(first.reserve("a", 400).number, 300)
    first.reserve("b", 200)
    first.close()
    again = open_ledger()
    assert again.report().teachers == {"a": Account(300, 0, 1), "b": Account(0, 200, 1)}
    again.reserve("a", 500)
    with pytest.raises(OverBudget):
        again.reserve("a", 1)


def test_runs_have_ceilings_of_their_own_and_share_the_day(open_ledger: OpenLedger) -> None:
    today = ["2026-01-01"]
    rules = {"usd_per_day": dollars(150)}
    one = open_ledger(100, run="one", rules=rules, day=lambda: today[0])
    two = open_ledger(100, run="two", rules=rules, day=lambda: today[0])
    made = one.reserve("a", 100)
    with pytest.raises(OverBudget, match="the day"):
        two.reserve("a", 60)
    two.reserve("a", 50)
    today[0] = "2026-01-02"
    two.reserve("a", 50)
    with pytest.raises(OverBudget, match="the run"):
        two.reserve("a", 1)
    one.settle(made.number, 40)  # counts for the day on which it was sent
    assert days(two) == {"2026-01-01": 90, "2026-01-02": 50}


def test_an_overrun_is_recorded_and_raises_later_bounds_also_after_a_restart(
    open_ledger: OpenLedger,
) -> None:
    ledger = open_ledger(10_000)
    assert ledger.settle(ledger.reserve("a", 100).number, 250) == 250
    assert ledger.report().run == Account(spent=250, requests=1, overruns=1)
    assert ledger.reserve("a", 100).amount == 250
    assert ledger.reserve("b", 100).amount == 100
    ledger.close()
    assert open_ledger(10_000).reserve("a", 10).amount == 25
    assert open_ledger(10_000, run="other").reserve("a", 10).amount == 10


def test_an_absurd_charge_stops_its_teacher_and_passes_no_ceiling(open_ledger: OpenLedger) -> None:
    rules = {"usd_per_day": dollars(1500), "per_teacher": {"a": dollars(600)}}
    ledger, other = open_ledger(rules=rules), open_ledger(run="other", rules=rules)
    made, under_way = ledger.reserve("a", 10), ledger.reserve("b", 100)
    assert ledger.settle(made.number, 10**30) == 600
    assert ledger.settle(under_way.number, 10**30) == 400
    assert ledger.report().run == Account(spent=1000, requests=2, overruns=2)
    with pytest.raises(OverBudget):
        ledger.reserve("a", 1)
    other.reserve("a", 500)  # the shared day lost no more than that run could have spent


def test_a_bound_beyond_every_number_is_refused(open_ledger: OpenLedger) -> None:
    with pytest.raises(OverBudget):
        open_ledger().reserve("a", 10**40)


async def test_reservations_of_a_process_that_died_stay_counted(
    open_ledger: OpenLedger, tmp_path: Path
) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from composer_mesh.actors.panel.ledger import *\n"
        "ledger = Ledger(Path(sys.argv[1]), BudgetRules(usd=1e-6), 'run')\n"
        "ledger.reserve('a', 700); os._exit(9)"
    )
    path = str(tmp_path / "ledger.sqlite")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, path)
    assert await child.wait() == 9
    ledger = open_ledger()
    with pytest.raises(OverBudget, match=r"the run, \$0.000001, of which \$0.000001 are"):
        ledger.reserve("a", 301)
    assert ledger.report().run.reserved == 700


def test_several_changes_together_are_all_or_none(open_ledger: OpenLedger) -> None:
    ledger = open_ledger()
    with suppress(SettledTwice), ledger.file.transaction():
        made = ledger.reserve("a", 10)
        ledger.settle(made.number, 5)
        ledger.settle(made.number, 5)
    assert ledger.report().run == Account()


def test_a_ledger_in_memory_keeps_the_same_rules() -> None:
    ledger = Ledger(None, BudgetRules(usd=dollars(100)), "run")
    ledger.settle(ledger.reserve("a", 60).number, 50)
    with pytest.raises(OverBudget):
        ledger.reserve("a", 51)
    assert ledger.report().run == Account(spent=50, requests=1)
    ledger.close()


def test_a_file_that_is_no_ledger_is_named_with_the_repair_and_left_alone(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other.sqlite"
    text.write_text("not a database, but long enough to be read as one" * 40)
    with sqlite3.connect(other) as rows:
        rows.execute("CREATE TABLE mine (x)")
    rows.close()
    for path, reason in (
        (text, "not a database"),
        (other, "another kind"),
        (tmp_path, "unable to open"),
    ):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(StoreError, match=rf"keep the ledger .*{reason}.*budget\.ledger"):
            Ledger(path, RULES, "run")
        assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_damaged_ledger_is_found_when_it_is_opened(
    open_ledger: OpenLedger, tmp_path: Path
) -> None:
    ledger = open_ledger(10**9)
    for number in range(200):
        ledger.reserve(f"teacher {number}", 1)
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot keep the ledger"):
        Ledger(path, RULES, "run")
