"""Prices: what OpenRouter lists, what it is told, and what a teacher may cost at most."""

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest
from fake_provider import ASK, KEY, TEACHER, TOOLS, Script, ask, client, error, said

from composer_mesh.actors.provider.errors import (
    ProviderMalformed,
    ProviderRateError,
    ProviderServerError,
)
from composer_mesh.actors.provider.money import highest_prices, listed_prices, routing_of
from composer_mesh.rollouts.budget import Prices, nano

PRICES = Prices.per_million(2.0, 8.0)
PAID = replace(TEACHER, prices=PRICES)
OPENROUTER = replace(PAID, routing={"zdr": True})


async def test_openrouter_is_asked_for_costs_and_for_no_dearer_provider() -> None:
    script = Script(said("x"))
    await ask(script, OPENROUTER)
    body = json.loads(script.requests[0].content)
    assert body["usage"] == {"include": True}
    assert body["provider"] == {"zdr": True, "max_price": {"prompt": 2.0, "completion": 8.0}}


def test_a_price_limit_of_the_config_is_what_a_provider_may_charge() -> None:
    teacher = replace(PAID, routing={"max_price": {"prompt": 5}})
    assert highest_prices(teacher) == Prices.per_million(5.0, 8.0)
    assert routing_of(teacher) == {"max_price": {"prompt": 5, "completion": 8.0}}
    assert routing_of(replace(TEACHER, routing={})) == {}


def listing(**pricing: Any) -> dict[str, Any]:
    return {"data": [{"id": "a"}, None, {"id": "some/model", "pricing": pricing}]}


@pytest.mark.parametrize(
    ("listed", "prices"),
    [
        (listing(prompt="0.000002", completion="0.000008"), PRICES),
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
        bare = replace(PAID, prices=None, concurrency=9)
        assert await asking.prices(bare) is None
        await asking.complete(PAID, ASK, TOOLS, seed=0)
