"""The ledger from an event loop: a thousand at once, cancelled callers, a file that breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gated_ledger import GatedLedger
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.provider.errors import ProviderBudgetError
from composer_mesh.actors.sqlite_file import MOST
from composer_mesh.rollouts.budget import Account, BudgetRules, SettledTwice, dollars


@pytest.fixture
async def ledger() -> GatedLedger:
    return GatedLedger(1000)


@pytest.fixture
async def meter(ledger: GatedLedger) -> AsyncIterator[LedgerMeter]:
    meter = LedgerMeter(ledger)
    yield meter
    ledger.file.gate.set()
    await meter.aclose()


async def pay(meter: LedgerMeter, bound: int, charge: int | None) -> int:
    """What one request was charged; 0 where it was refused."""
    try:
        reservation = await meter.reserve("a", bound)
    except ProviderBudgetError:
        return 0
    await asyncio.sleep(0)
    return await meter.settle(reservation, charge)


@pytest.mark.parametrize("limit", [0, 50, 300, 800, 1000, 5000])
async def test_a_thousand_at_once_over_two_processes_files_never_pass_the_ceiling(
    tmp_path: Path, limit: int
) -> None:
    rules = BudgetRules(usd=dollars(limit))
    meters = [LedgerMeter(Ledger(tmp_path / "l", rules, "run")) for _ in range(2)]
    paid = await asyncio.gather(*(pay(meters[n % 2], 7, 7) for n in range(1000)))
    report = await meters[0].report()
    assert sum(paid) == report.run.spent == min(limit // 7, 1000) * 7
    assert report.run.reserved == 0
    for meter in meters:
        await meter.aclose()


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(0, 2000),
    requests=st.lists(st.tuples(st.integers(0, 300), st.none() | st.floats(0, 1)), max_size=60),
    seed=st.integers(0, 99),
)
def test_no_interleaving_of_tasks_passes_the_ceiling(
    limit: int, requests: list[tuple[int, float | None]], seed: int
) -> None:
    async def run() -> None:
        meter = LedgerMeter(Ledger(None, BudgetRules(usd=dollars(limit)), "run"))
        rng = random.Random(seed)

        async def one(bound: int, share: float | None) -> int:
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            return await pay(meter, bound, None if share is None else int(bound * share))

        tasks = [asyncio.create_task(one(*request)) for request in requests]
        for task in rng.sample(tasks, len(tasks) // 4):
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        known = sum(value for value in ended if isinstance(value, int))
        account = (await meter.report()).run
        assert known <= account.spent
        assert account.spent + account.reserved <= limit
        await meter.aclose()

    asyncio.run(run())


async def test_what_is_asked_while_the_ledger_writes_is_one_transaction(
    ledger: GatedLedger, meter: LedgerMeter
) -> None:
    ledger.file.gate.clear()
    asking = [asyncio.create_task(meter.reserve("a", 1)) for _ in range(MOST)]
    await asyncio.sleep(0)
    ledger.file.gate.set()
    assert len(set(await asyncio.gather(*asking))) == MOST
    assert ledger.file.transactions <= 2  # the thread takes one or more before the gate
    assert meter.run == Account(reserved=MOST, requests=MOST)


async def test_a_caller_that_is_cancelled_leaves_no_reservation(
    ledger: GatedLedger, meter: LedgerMeter
) -> None:
    ledger.file.gate.clear()
    asking = [asyncio.create_task(meter.reserve("a", 100)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert all(task.cancelled() for task in asking)
    ledger.file.gate.set()
    assert await meter.reserve("b", 0)
    account = (await meter.report()).run
    assert (account.spent, account.reserved) == (0, 0)


async def test_closing_waits_until_cancelled_callers_are_settled(
    ledger: GatedLedger, tmp_path: Path
) -> None:
    meter = LedgerMeter(Ledger(tmp_path / "l", BudgetRules(usd=1), "run"))
    asking = [asyncio.create_task(meter.reserve("a", 100)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await meter.aclose()
    again = Ledger(tmp_path / "l", BudgetRules(usd=1), "run")
    assert (again.report().run.spent, again.report().run.reserved) == (0, 0)
    again.close()


async def test_a_settlement_is_written_though_its_caller_is_cancelled(
    ledger: GatedLedger, meter: LedgerMeter
) -> None:
    reservation = await meter.reserve("a", 100)
    ledger.file.gate.clear()
    settling = asyncio.create_task(meter.settle(reservation, 40))
    await asyncio.sleep(0)
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
    ledger.file.gate.set()
    assert (await meter.report()).run == Account(spent=40, requests=1)


async def test_a_second_settlement_is_an_error_and_no_charge(meter: LedgerMeter) -> None:
    reservation = await meter.reserve("a", 100)
    assert await meter.settle(reservation, None) == 100
    with pytest.raises(SettledTwice):
        await meter.settle(reservation, None)
    assert meter.run == Account(spent=100, requests=1)


async def test_a_refusal_is_a_typed_error_that_says_which_ceiling(meter: LedgerMeter) -> None:
    with pytest.raises(ProviderBudgetError, match="does not fit under the ceiling of the run"):
        await meter.reserve("a", 1001)
    with pytest.raises(ProviderBudgetError, match="the cost of a request is unknown"):
        await meter.reserve("a", None)


async def test_nothing_is_sent_and_nothing_is_lost_when_the_ledger_cannot_be_written(
    ledger: GatedLedger, meter: LedgerMeter
) -> None:
    reservation = await meter.reserve("a", 100)
    ledger.file.breaks = True
    with pytest.raises(ProviderBudgetError, match="cannot keep the ledger"):
        await meter.reserve("a", 1)
    assert await meter.settle(reservation, 40) == 100
    assert meter.unwritten == 1
    ledger.file.breaks = False
    assert (await meter.report()).run == Account(reserved=100, requests=1)
