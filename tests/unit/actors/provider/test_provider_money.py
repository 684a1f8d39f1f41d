"""What a question is charged: told, computed, or all that was reserved; and never left open.

Prices: what OpenRouter lists, what it is told, and what a teacher may cost at most.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest
from fake_provider import (
    ASK,
    KEY,
    TEACHER,
    TOOLS,
    CeilingMeter,
    Script,
    ask,
    client,
    completion,
    error,
    fault,
    in_simulated_time,
    said,
)
from gated_ledger import GatedLedger

from composer_mesh.actors.panel.ledger import LedgerMeter
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderBudgetError,
    ProviderMalformed,
    ProviderRateError,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider.money import highest_prices, listed_prices, routing_of
from composer_mesh.rollouts.budget import TEMPLATE_TOKENS, Account, Prices, nano

PRICES = Prices.per_million(2000.0, 8000.0)
PAID = replace(TEACHER, prices=PRICES, max_tokens=100)
TOKENS = {"prompt_tokens": 10, "completion_tokens": 5}
BY_TOKENS = 10 * 2_000_000 + 5 * 8_000_000
DIME = 10**8
ALL = "all that was reserved"


async def charged(*replies: Any, teacher: TeacherEndpoint = PAID) -> tuple[CeilingMeter, Any]:
    """The meter after a question with these replies, and how the question ended."""
    meter, script = CeilingMeter(), Script(*replies)
    async with client(script, attempts=len(replies)) as asking:
        question = asking.complete(teacher, ASK, TOOLS, seed=0, meter=meter)
        (end,) = await asyncio.gather(question, return_exceptions=True)
    assert not meter.open
    assert len(meter.bounds) == len(script.requests) == len(replies)
    return meter, end


@pytest.mark.parametrize(
    ("usage", "charge"),
    [
        ({"cost": 0.0125}, 12_500_000),
        ({"cost": 0}, 0),
        ({"cost": 1e-10}, 1),
        ({"cost": 0.1, "is_byok": False, "cost_details": {"upstream_inference_cost": 9}}, DIME),
        (
            {"cost": 0.1, "is_byok": True, "cost_details": {"upstream_inference_cost": 2}},
            21 * 10**8,
        ),
        ({"cost": 0.1, "is_byok": True}, DIME),
        ({"cost": 0.1, "is_byok": True, "cost_details": {"upstream_inference_cost": "x"}}, ALL),
        ({"cost": 10**30}, ALL),
        ({"cost": 1e30, **TOKENS}, ALL),
        ({"prompt_tokens": 10**9, "completion_tokens": 10**9}, ALL),
        (TOKENS, BY_TOKENS),
        ({"cost": None, **TOKENS}, BY_TOKENS),
        ({"cost": "0.1", **TOKENS}, BY_TOKENS),
        ({"cost": -1, **TOKENS}, BY_TOKENS),
        ({"cost": True, **TOKENS}, BY_TOKENS),
        ({"cost": [], **TOKENS}, BY_TOKENS),
        ({"cost": -1}, ALL),
        ({"prompt_tokens": 10}, ALL),
        ({"prompt_tokens": 10, "completion_tokens": -5}, ALL),
        ({"prompt_tokens": 10, "completion_tokens": 5.0}, ALL),
        ({"prompt_tokens": True, "completion_tokens": 5}, ALL),
        ({"prompt_tokens": 10, "completion_tokens": 10**12}, ALL),
        ([], ALL),
        (None, ALL),
    ],
)
async def test_an_answer_costs_what_it_tells(usage: Any, charge: int | str) -> None:
    meter, answer = await charged(said("x", usage=usage))
    expected = meter.bounds[0] if charge == ALL else charge
    assert meter.charges == [expected]
    assert (round(answer.usd * 1e9), answer.usd_known) == (expected, charge != ALL)


@pytest.mark.parametrize("cost", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_cost_that_is_no_number_is_not_believed(cost: str) -> None:
    body = json.dumps(completion({"content": "x"}, usage={"cost": "@"})).replace('"@"', cost)
    meter, _ = await charged(httpx.Response(200, text=body))
    assert meter.charges == meter.bounds


@pytest.mark.parametrize(
    ("reply", "charge"),
    [
        *((error(status), 0) for status in (400, 401, 402, 403, 404, 409, 422, 429)),
        (httpx.Response(302), 0),
        (httpx.ConnectError("refused"), 0),
        (httpx.ConnectTimeout("slow"), 0),
        (error(408), ALL),
        (error(500), ALL),
        (httpx.Response(502, text="<html>"), ALL),
        (httpx.ReadTimeout("silent"), ALL),
        (httpx.WriteError("cut"), ALL),
        (httpx.RemoteProtocolError("cut"), ALL),
        (httpx.Response(204), ALL),
        (httpx.Response(200, text='{"usage": {"cost": 0.1}'), ALL),
        (httpx.Response(200, content=b'{"choices": "\xff"}'), ALL),
        (httpx.Response(200, json={"error": {"code": 429}}), ALL),
        (httpx.Response(200, json={"choices": []}), ALL),
        (httpx.Response(200, json={"choices": [], "usage": TOKENS}), BY_TOKENS),
        (httpx.Response(500, json={"error": "x", "usage": {"cost": 0.5}}), 5 * 10**8),
        (httpx.Response(429, json={"error": "x", "usage": {"cost": 0.5}}), 5 * 10**8),
    ],
)
async def test_a_failure_costs_nothing_only_where_that_is_certain(
    reply: Any, charge: int | str
) -> None:
    meter, failure = await charged(reply)
    assert meter.charges == (meter.bounds if charge == ALL else [charge])
    assert failure.charged == meter.spent


async def test_an_answer_costs_all_its_attempts() -> None:
    meter, answer = await charged(error(500), error(429), said("x", usage={"cost": 0.25}))
    assert meter.charges == [meter.bounds[0], 0, 25 * 10**7]
    assert answer.usd == pytest.approx(meter.spent / 1e9)
    assert answer.usd_known is False


async def test_the_reservation_covers_every_byte_sent_and_every_token_allowed() -> None:
    meter, script = CeilingMeter(), Script(said("x"))
    await ask(script, PAID, meter)
    size = len(script.requests[0].content)
    assert meter.bounds == [PRICES.cost(size + TEMPLATE_TOKENS, 100)]


async def test_an_unknown_price_is_told_as_such() -> None:
    meter, answer = await charged(said("x", usage=TOKENS), teacher=TEACHER)
    assert meter.bounds == [None]
    assert answer.usd_known is False


async def test_without_a_meter_the_told_cost_is_still_told() -> None:
    answer = await ask(Script(said("x", usage={"cost": 0.0125})))
    assert (answer.usd, answer.usd_known) == (0.0125, True)
    unknown = await ask(Script(said("x")))
    assert (unknown.usd, unknown.usd_known) == (0.0, False)


async def test_a_free_teachers_cost_is_always_known() -> None:
    free = replace(TEACHER, prices=Prices(Decimal(0), Decimal(0)))
    answer = await ask(Script(error(500), said("x")), free, CeilingMeter())
    assert (answer.usd, answer.usd_known) == (0.0, True)


async def test_what_the_ceiling_does_not_hold_is_not_sent() -> None:
    script = Script(error(500), said("x"))
    meter = CeilingMeter()
    await ask(Script(said("x")), PAID, meter)
    bound = meter.bounds[0]
    assert bound is not None
    failure = await fault(script, PAID, meter=CeilingMeter(bound))
    assert isinstance(failure, ProviderBudgetError)
    assert (len(script.requests), failure.charged) == (1, bound)


@in_simulated_time
async def test_a_question_whose_time_went_by_while_it_reserved_is_not_sent() -> None:
    script = Script()

    class Slow(CeilingMeter):
        async def reserve(self, teacher: str, bound: int | None) -> int:
            await asyncio.sleep(99.0)
            return await super().reserve(teacher, bound)

    meter = Slow()
    failure = await fault(script, PAID, meter=meter)
    assert isinstance(failure, ProviderTimeout)
    assert (script.requests, meter.charges) == ([], [0])


@pytest.mark.parametrize(
    "usage",
    [
        {"cost": 10**30},
        {"cost": 3.0},
        {"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 1e9}},
        {"prompt_tokens": 10**9, "completion_tokens": 0},
    ],
)
async def test_a_provider_that_states_more_than_its_prices_is_charged_those_and_not_asked_again(
    usage: Any,
) -> None:
    meter, script = CeilingMeter(), Script(said("x", usage=usage), said("y"), said("z"))
    other = replace(PAID, name="t2")
    async with client(script) as asking:
        first = await asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter)
        with pytest.raises(
            ProviderBudgetError, match=r"stated \$.* costs at most \$.* at its known prices"
        ):
            await asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter)
        second = await asking.complete(other, ASK, TOOLS, seed=0, meter=meter)
    assert meter.charges == meter.bounds
    assert (first.action_text, first.usd_known, second.action_text) == ("x", False, "y")
    assert len(script.requests) == 2


async def test_a_free_teacher_that_states_a_cost_is_not_asked_again() -> None:
    free = replace(TEACHER, prices=Prices(Decimal(0), Decimal(0)))
    meter = CeilingMeter(0)
    async with client(Script(said("x", usage={"cost": 0.01}), said("y"))) as asking:
        await asking.complete(free, ASK, TOOLS, seed=0, meter=meter)
        with pytest.raises(ProviderBudgetError, match=r"stated \$0\.010000"):
            await asking.complete(free, ASK, TOOLS, seed=0, meter=meter)
    assert meter.spent == 0


class Stuck(CeilingMeter):
    """A meter whose writes take until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.asked = asyncio.Event(), asyncio.Event()

    async def reserve(self, teacher: str, bound: int | None) -> int:
        self.asked.set()
        await self.gate.wait()
        return await super().reserve(teacher, bound)

    async def settle(self, reservation: int, charge: int | None) -> int:
        self.asked.set()
        await self.gate.wait()
        return await super().settle(reservation, charge)


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[ProviderClient, asyncio.Event]]:
    """A client whose provider never answers, and whether it was asked."""
    asked = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    transport = httpx.MockTransport(hang)
    environ = {"TEST_KEY": KEY}
    async with ProviderClient(Timeouts(60.0), environ=environ, transport=transport) as asking:
        yield asking, asked


async def test_a_cancelled_question_is_charged_all(
    hanging: tuple[ProviderClient, asyncio.Event],
) -> None:
    asking, asked = hanging
    meter = CeilingMeter()
    question = asyncio.create_task(asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter))
    await asked.wait()
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert meter.charges == meter.bounds
    assert not meter.open
    assert asking.details()["t1"]["under_way"] == 0


async def turns_of_the_loop() -> None:
    """Let tasks go on until each waits for something outside the loop."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_second_cancel_does_not_lose_the_charge(
    hanging: tuple[ProviderClient, asyncio.Event],
) -> None:
    asking, asked = hanging
    ledger = GatedLedger(10**10)
    meter = LedgerMeter(ledger)
    question = asyncio.create_task(asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter))
    await asked.wait()
    reserved = meter.run.reserved
    ledger.file.gate.clear()
    for _ in range(2):
        question.cancel()
        await turns_of_the_loop()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert (meter.run.spent, meter.run.reserved) == (0, reserved)
    ledger.file.gate.set()
    await meter.aclose()
    assert (meter.run.spent, meter.run.reserved) == (reserved, 0)


async def test_a_question_cancelled_while_it_reserves_costs_nothing(
    hanging: tuple[ProviderClient, asyncio.Event],
) -> None:
    asking, asked = hanging
    ledger = GatedLedger(10**10)
    meter = LedgerMeter(ledger)
    ledger.file.gate.clear()
    question = asyncio.create_task(asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter))
    await turns_of_the_loop()
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    ledger.file.gate.set()
    await meter.aclose()
    assert (meter.run, asked.is_set()) == (Account(requests=1), False)


@in_simulated_time
async def test_a_slow_meter_does_not_lose_an_answer_that_is_paid() -> None:
    meter = Stuck()
    meter.gate.set()

    async def answer(request: httpx.Request) -> httpx.Response:
        meter.gate.clear()
        meter.asked.clear()
        return said("x", usage={"cost": 0.5})

    transport, environ = httpx.MockTransport(answer), {"TEST_KEY": KEY}
    async with ProviderClient(Timeouts(0.05), environ=environ, transport=transport) as asking:
        question = asyncio.create_task(asking.complete(PAID, ASK, TOOLS, seed=0, meter=meter))
        await meter.asked.wait()
        await asyncio.wait([question], timeout=0.1)  # twice the time that a question has
        assert not question.done()
        meter.gate.set()
        assert (await question).usd == 0.5


LOW_PRICES = Prices.per_million(2.0, 8.0)
LOW_PAID = replace(TEACHER, prices=LOW_PRICES)
OPENROUTER = replace(LOW_PAID, routing={"zdr": True})


async def test_openrouter_is_asked_for_costs_and_for_no_dearer_provider() -> None:
    script = Script(said("x"))
    await ask(script, OPENROUTER)
    body = json.loads(script.requests[0].content)
    assert body["usage"] == {"include": True}
    assert body["provider"] == {"zdr": True, "max_price": {"prompt": 2.0, "completion": 8.0}}


def test_a_price_limit_of_the_config_is_what_a_provider_may_charge() -> None:
    teacher = replace(LOW_PAID, routing={"max_price": {"prompt": 5}})
    assert highest_prices(teacher) == Prices.per_million(5.0, 8.0)
    assert routing_of(teacher) == {"max_price": {"prompt": 5, "completion": 8.0}}
    assert routing_of(replace(TEACHER, routing={})) == {}


def listing(**pricing: Any) -> dict[str, Any]:
    return {"data": [{"id": "a"}, None, {"id": "some/model", "pricing": pricing}]}


@pytest.mark.parametrize(
    ("listed", "prices"),
    [
        (listing(prompt="0.000002", completion="0.000008"), LOW_PRICES),
        (listing(prompt="0", completion="0", request="0"), Prices(Decimal(0), Decimal(0))),
        (
            listing(prompt="0.1", completion="0.2", request="0.3", internal_reasoning="0.5"),
            Prices(Decimal("0.1"), Decimal("0.5"), Decimal("0.3")),
        ),
        (listing(prompt="-1", completion="-1"), None),
        (listing(prompt="0.1"), None),
        (listing(prompt="NaN", completion="1"), None),
        (listing(prompt="1e999", completion="1"), None),
        (listing(prompt=[], completion="1"), None),
        (listing(prompt="0.1", completion="0.1", request="x"), None),
        ({"data": [{"id": "other", "pricing": {"prompt": "1", "completion": "1"}}]}, None),
        ({"data": "x"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_prices_are_read_from_the_list_of_models(listed: Any, prices: Prices | None) -> None:
    assert listed_prices(listed, "some/model") == prices


async def test_the_list_of_models_is_asked_for_with_the_key_and_without_charge() -> None:
    replies = [error(500), httpx.Response(200, json=listing(prompt="1e-6", completion="2e-6"))]
    script = Script(*replies)
    async with client(script) as asking:
        prices = await asking.prices(OPENROUTER)
        await asking.aclose()
    assert prices is not None
    assert prices.cost(1, 1) == nano("0.000003")
    request = script.requests[1]
    assert (request.method, str(request.url)) == ("GET", "https://provider.test/v1/models")
    assert request.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(429), ProviderRateError),
        (httpx.ConnectError("x"), ProviderServerError),
        (httpx.Response(200, text="<html>"), ProviderMalformed),
    ],
)
async def test_a_list_that_cannot_be_read_is_an_error(reply: Any, kind: type[Exception]) -> None:
    async with client(Script(reply), attempts=1) as asking:
        with pytest.raises(kind):
            await asking.prices(OPENROUTER)


async def test_prices_may_be_asked_for_before_a_teacher_is_complete() -> None:
    script = Script(httpx.Response(200, json=listing()), said("x"))
    async with client(script) as asking:
        bare = replace(LOW_PAID, prices=None, concurrency=9)
        assert await asking.prices(bare) is None
        await asking.complete(LOW_PAID, ASK, TOOLS, seed=0)
