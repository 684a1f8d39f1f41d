"""The provider client against a real port where everything goes wrong that can.

The proxy is a benchmark's: it draws faults by the seed, charges whenever it generated, and echoes
the key into its error bodies.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from itertools import count
from typing import Any

import pytest
from fake_provider import CeilingMeter

from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.actors.provider.money import Meter
from composer_mesh.actors.provider.request_limiter import BreakerRules
from composer_mesh.rollouts.budget import BudgetRules, Prices, dollars
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer

faults: Any = importlib.import_module("fault_proxy")

KEY = "sk-proxy-98f1c2d3e4a5b6"
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
MODELS = {
    "m/cost": faults.Model(2_000, 8_000, "cost"),
    "m/tokens": faults.Model(500, 1_500, "tokens"),
    "m/nothing": faults.Model(100, 400, "nothing"),
}
TIMEOUTS = Timeouts(total_s=2.0, connect_s=1.0, read_s=0.15)
RETRIES = RetryDelays(attempts=3, base_s=0.005, cap_s=0.02)
RULES = BreakerRules(failures=5, rest_s=0.05)
WORKERS = 6
REQUESTS = 800
"""Enough that each of the faults is met; tests/fuzz reads 30,000 replies."""


@pytest.fixture(autouse=True)
def _no_log_line_holds_the_key(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert KEY not in caplog.text


def teachers(proxy: Any) -> list[TeacherEndpoint]:
    return [
        TeacherEndpoint(
            name.removeprefix("m/"),
            proxy.base_url,
            name,
            "PROXY_KEY",
            max_tokens=64,
            prices=Prices(Decimal(model.prompt).scaleb(-9), Decimal(model.completion).scaleb(-9)),
            routing={} if model.tells == "cost" else None,
        )
        for name, model in MODELS.items()
    ]


def client() -> ProviderClient:
    return ProviderClient(TIMEOUTS, RETRIES, RULES, environ={"PROXY_KEY": KEY})


def proxy(seed: int, weights: Any) -> Any:
    return faults.FaultProxy(KEY, MODELS, seed, weights)


class Asking:
    """Workers that ask every teacher until enough was asked; each end is kept."""

    def __init__(self, asking: ProviderClient, of: Any, meter: Meter) -> None:
        self.client, self.proxy, self.meter = asking, of, meter
        self.ends: list[TeacherAnswer | ProviderError] = []
        self._numbers = count()

    async def until(self, requests: int) -> None:
        """Until the proxy has seen so many requests, or nothing is sent any more."""
        await asyncio.gather(
            *(
                self._work(teacher, requests)
                for teacher in teachers(self.proxy)
                for _ in range(WORKERS)
            )
        )

    async def until_closed(self, teacher: TeacherEndpoint) -> None:
        """Until the teacher's breaker lets everything through again."""
        while self.client.details()[teacher.name]["breaker"] != "closed":
            self.ends.append(await self._ask(teacher))
            await asyncio.sleep(RULES.rest_s / 4)

    async def _work(self, teacher: TeacherEndpoint, requests: int) -> None:
        while self.proxy.requests < requests:
            end = await self._ask(teacher)
            self.ends.append(end)
            if isinstance(end, ProviderBudgetError):
                return
            if isinstance(end, ProviderError) and end.kind is FailureKind.SUSPENDED:
                await asyncio.sleep(RULES.rest_s / 4)  # leaves the others time to ask

    async def _ask(self, teacher: TeacherEndpoint) -> TeacherAnswer | ProviderError:
        number = next(self._numbers)
        messages = [{"role": "user", "content": f"What is {number} plus 3?"}]
        try:
            return await self.client.complete(
                teacher, messages, TOOLS, seed=number, meter=self.meter
            )
        except ProviderError as error:
            return error

    def kinds(self) -> Counter[str]:
        return Counter(
            end.kind.value if isinstance(end, ProviderError) else "answered" for end in self.ends
        )


async def test_every_request_in_a_storm_ends_as_an_answer_or_a_typed_failure() -> None:
    meter = CeilingMeter()
    async with proxy(7, {**faults.STORM, faults.Fault.HUGE: 2.0}) as served, client() as asking:
        run = Asking(asking, served, meter)
        await run.until(REQUESTS)
        details = asking.details()
    assert served.requests >= REQUESTS
    assert set(served.met) == set(faults.Fault)
    kinds = run.kinds()
    # What is sent again ends as its last attempt did, which is chance; what is final always shows.
    assert {"answered", "malformed", "moderation"} <= set(kinds)
    assert set(kinds) <= {"answered", *FailureKind}
    assert kinds["answered"] > served.requests / 2
    assert sum(sum(told["counts"].values()) for told in details.values()) == len(run.ends)
    assert all(told["under_way"] == told["waiting"] == 0 for told in details.values())
    assert not any(KEY in f"{end!r} {end} {vars_of(end)}" for end in run.ends)
    assert not meter.open
    assert served.charged <= meter.spent
    assert served.unreadable == 0


def vars_of(end: TeacherAnswer | ProviderError) -> str:
    return str(vars(end)) if isinstance(end, ProviderError) else str(end.message)


async def test_the_breaker_opens_in_an_outage_and_closes_after_it() -> None:
    async with proxy(3, faults.OUTAGE) as served, client() as asking:
        run = Asking(asking, served, CeilingMeter())
        await run.until(30)
        assert all(told["opened"] >= 1 for told in asking.details().values())
        assert run.kinds()["suspended"] > 0
        assert "answered" not in run.kinds()
        served.weights = faults.CALM
        await asyncio.gather(*map(run.until_closed, teachers(served)))
        details = asking.details()
    assert {told["breaker"] for told in details.values()} == {"closed"}
    assert all(told["counts"]["answered"] for told in details.values())


async def cost_of(requests: int, meter: Meter) -> tuple[Any, Asking]:
    async with proxy(11, faults.STORM) as served, client() as asking:
        run = Asking(asking, served, meter)
        await run.until(requests)
    return served, run


async def test_the_proxys_own_ledger_never_passes_the_ceiling() -> None:
    unbounded = CeilingMeter()
    served, _ = await cost_of(200, unbounded)
    assert served.charged <= unbounded.spent
    for share in (0.1, 0.3, 0.8, 1.5):
        ceiling = int(unbounded.spent * share)
        rules = BudgetRules(usd=dollars(ceiling))
        meter = LedgerMeter(Ledger(None, rules, "faults"))
        served, run = await cost_of(200, meter)
        spent, reserved = meter.run.spent, meter.run.reserved
        await meter.aclose()
        assert served.charged <= spent <= ceiling
        assert (reserved, meter.unwritten) == (0, 0)
        assert served.charged > ceiling * 0.2 or share > 1
        assert ("budget" in run.kinds()) == (share < 1)


async def test_no_free_request_is_charged_for_a_wrong_key() -> None:
    async with (
        proxy(1, faults.CALM) as served,
        ProviderClient(TIMEOUTS, RETRIES, RULES, environ={"PROXY_KEY": "sk-wrong-0123456"}) as c,
    ):
        run = Asking(c, served, meter := CeilingMeter())
        end = await run._ask(teachers(served)[0])
    assert isinstance(end, ProviderError)
    assert (end.kind, meter.spent, served.charged) == (FailureKind.AUTH, 0, 0)
    assert "sk-wrong" not in str(end)
    assert "[key]" in end.text


async def test_the_proxys_list_of_prices_is_read() -> None:
    async with proxy(1, faults.CALM) as served, client() as asking:
        found = [await asking.prices(teacher) for teacher in teachers(served)]
    assert found == [teacher.prices for teacher in teachers_at("http://127.0.0.1:1/v1")]


def teachers_at(url: str) -> list[TeacherEndpoint]:
    class Nowhere:
        base_url = url

    return teachers(Nowhere)


async def test_a_cancelled_question_leaves_its_connection_closed_and_is_charged() -> None:
    async with proxy(5, {faults.Fault.HANG: 1.0}) as served, client() as asking:
        meter = CeilingMeter()
        run = Asking(asking, served, meter)
        questions = [asyncio.create_task(run._ask(teachers(served)[0])) for _ in range(8)]
        await asyncio.wait(questions, timeout=0.1)
        for question in questions:
            question.cancel()
        ends = await asyncio.gather(*questions, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    assert not meter.open
    assert served.charged <= meter.spent
