"""The hint service against a scripted provider: what is paid, what is kept, what is given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from composer_mesh.actors.hint_writer import (
    ONCE,
    PATIENCE,
    REPAIR,
    HintCache,
    HintService,
    open_meter,
)
from composer_mesh.actors.provider.client import (
    ClientClosed,
    ProviderClient,
    TeacherEndpoint,
    Timeouts,
)
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.sdpo import HintWriterConfig
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.rollouts.money import dollars

WRITER = TeacherEndpoint("hint writer", "https://writer.test/v1", "some/model")
Answer = Callable[[httpx.Request], Any]
OpenDesk = Callable[..., HintService]


def said(text: Any, usd: float | None = 0.001) -> httpx.Response:
    usage = {} if usd is None else {"usage": {"cost": usd}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return httpx.Response(200, json={"choices": [choice], **usage})


def question(number: int) -> HintRequest:
    return HintRequest([{"role": "user", "content": f"error {number}"}])


def spent(hint_service: HintService) -> float:
    return dollars(hint_service.meter.run.spent)


class Provider:
    """Answers each request with a text of its own; remembers how many it got."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.requests: list[Any] = []
        self.asked = asyncio.Event()
        self._answer = answer or (lambda request: said(f"Word {len(self.requests)}."))

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        self.asked.set()
        found = self._answer(request)
        return await found if asyncio.iscoroutine(found) else found


@pytest.fixture
async def open_desk(tmp_path: Path) -> AsyncIterator[OpenDesk]:
    desks: list[HintService] = []

    def open_one(
        provider: Provider,
        requests: int = 99,
        usd: float = 1.0,
        assumed_usd: float = 0.001,
        timeout_s: float = 20.0,
        max_concurrent: int = 8,
        **earlier: Any,
    ) -> HintService:
        transport = httpx.MockTransport(provider)
        client = ProviderClient(Timeouts(timeout_s), ONCE, PATIENCE, transport=transport)
        cache = HintCache(tmp_path / "kept" / "hints.sqlite")
        budget = {"budget_requests": requests, "budget_usd": usd, "assumed_usd": assumed_usd}
        meter = open_meter(WRITER, HintWriterConfig(kind="builtin", **budget), **earlier)
        writer = replace(WRITER, concurrency=max_concurrent)
        desks.append(HintService(client, writer, cache, meter))
        return desks[-1]

    yield open_one
    for hint_service in desks:
        await hint_service.aclose()


async def test_words_come_back_in_the_order_of_the_questions(open_desk: OpenDesk) -> None:
    provider = Provider(lambda request: said(json.loads(request.content)["messages"][0]["content"]))
    replies = await open_desk(provider).write([question(n) for n in range(20)])
    assert [reply.text for reply in replies] == [f"error {n}" for n in range(20)]
    assert {(reply.origin, reply.sent, reply.usd) for reply in replies} == {("llm", True, 0.001)}
    assert provider.requests[0]["model"] == "some/model"


async def test_a_repeated_run_pays_nothing(open_desk: OpenDesk) -> None:
    provider = Provider()
    first = await open_desk(provider).write([question(n) for n in range(3)])
    again = open_desk(provider, requests=1)
    second = await again.write([question(n) for n in range(3)])
    assert [reply.text for reply in second] == [reply.text for reply in first]
    assert [(reply.origin, reply.sent, reply.usd) for reply in second] == [("cached", False, 0)] * 3
    assert (len(provider.requests), again.meter.run.requests) == (3, 0)


async def test_equal_questions_at_the_same_time_are_paid_once(open_desk: OpenDesk) -> None:
    provider = Provider()
    hint_service = open_desk(provider)
    one, two = await asyncio.gather(
        hint_service.write([question(1), question(1)]), hint_service.write([question(1)])
    )
    replies = [*one, *two]
    assert len(provider.requests) == 1
    assert sorted(reply.origin for reply in replies) == ["cached", "cached", "llm"]
    assert sum(reply.usd for reply in replies) == pytest.approx(0.001)
    assert hint_service.counts == {"cached": 2, "llm": 1}


async def test_another_model_is_asked_anew(open_desk: OpenDesk) -> None:
    assert question(1).key("a") != question(1).key("b")
    assert question(1).key("a") != question(2).key("a")
    assert question(1).key("a") == question(1).key("a")


async def test_requests_end_with_their_budget(open_desk: OpenDesk) -> None:
    provider = Provider()
    hint_service = open_desk(provider, requests=2)
    replies = await hint_service.write([question(n) for n in range(5)])
    assert sum(reply.sent for reply in replies) == len(provider.requests) == 2
    refused = [reply for reply in replies if reply.origin == "none"]
    assert {reply.reason for reply in refused} == {f"all 2 requests of the run are spent: {REPAIR}"}


async def test_what_the_run_spent_before_counts_in_the_budget(open_desk: OpenDesk) -> None:
    provider = Provider()
    few = open_desk(provider, requests=5, sent=4)
    poor = open_desk(provider, usd=0.002, spent_usd=0.001)
    for hint_service, first in ((few, 0), (poor, 10)):
        replies = await hint_service.write([question(first + n) for n in range(3)])
        assert sum(reply.sent for reply in replies) == 1
    assert few.meter.run.requests == 5
    assert spent(poor) == pytest.approx(0.002)


async def test_dollars_are_never_overspent_by_requests_under_way_together(
    open_desk: OpenDesk,
) -> None:
    provider = Provider(lambda request: said("Word.", usd=0.01))
    hint_service = open_desk(provider, usd=0.035, assumed_usd=0.01, max_concurrent=50)
    replies = await hint_service.write([question(n) for n in range(50)])
    assert len(provider.requests) == 3
    assert spent(hint_service) == pytest.approx(0.03)
    assert sum(reply.usd for reply in replies) == pytest.approx(0.03)
    assert hint_service.last_failure.endswith(REPAIR)


async def test_a_price_above_the_assumed_one_is_set_aside_from_then_on(open_desk: OpenDesk) -> None:
    provider = Provider(lambda request: said("Word.", usd=0.02))
    hint_service = open_desk(provider, usd=0.05, assumed_usd=0.001, max_concurrent=1)
    await hint_service.write([question(n) for n in range(9)])
    assert (len(provider.requests), spent(hint_service)) == (2, pytest.approx(0.04))


async def test_an_unknown_price_is_charged_as_assumed(open_desk: OpenDesk) -> None:
    provider = Provider(lambda request: said("Word.", usd=None))
    hint_service = open_desk(provider, usd=0.005, assumed_usd=0.002)
    replies = await hint_service.write([question(n) for n in range(9)])
    assert len(provider.requests) == 2
    assert sum(reply.usd for reply in replies) == pytest.approx(0.004)


async def test_free_answers_need_no_dollars(open_desk: OpenDesk) -> None:
    provider = Provider(lambda request: said("Word.", usd=0.0))
    hint_service = open_desk(provider, usd=0.0, assumed_usd=0.0)
    replies = await hint_service.write([question(n) for n in range(9)])
    assert {reply.origin for reply in replies} == {"llm"}


async def test_a_slow_provider_is_waited_for_once_and_charged(open_desk: OpenDesk) -> None:
    async def never(request: httpx.Request) -> None:
        await asyncio.Event().wait()

    hint_service = open_desk(Provider(never), timeout_s=0.2, max_concurrent=2)
    clock = asyncio.get_running_loop().time
    began = clock()
    replies = await hint_service.write([question(n) for n in range(6)])
    assert clock() - began < 5
    assert {reply.origin for reply in replies} == {"none"}
    assert sum(reply.sent for reply in replies) == hint_service.meter.run.requests >= 2
    assert spent(hint_service) == pytest.approx(sum(reply.usd for reply in replies))
    assert spent(hint_service) >= 0.002
    assert any("no answer within 0.2 s" in reply.reason for reply in replies)


async def test_a_provider_that_fails_in_a_row_is_left_alone_for_a_while(
    open_desk: OpenDesk,
) -> None:
    provider = Provider(lambda request: httpx.Response(500, json={"error": {"message": "no"}}))
    hint_service = open_desk(provider, max_concurrent=1)
    replies = await hint_service.write([question(n) for n in range(20)])
    assert len(provider.requests) == PATIENCE.failures
    assert {reply.origin for reply in replies} == {"none"}
    assert "failed in a row" in hint_service.last_failure


@pytest.mark.parametrize("text", ["", "  ", "\x00\x1f", "<tool_call>\n{}\n</tool_call>"])
async def test_an_answer_that_is_no_plain_text_is_paid_once_and_never_shown(
    open_desk: OpenDesk, text: str
) -> None:
    provider = Provider(lambda request: said(text))
    hint_service = open_desk(provider)
    (reply,) = await hint_service.write([question(1)])
    assert (reply.text, reply.origin, reply.sent, reply.usd) == ("", "none", True, 0.001)
    (again,) = await hint_service.write([question(1)])
    assert (again.text, again.origin, again.sent, again.usd) == ("", "none", False, 0.0)
    assert len(provider.requests) == 1


async def test_a_closed_desk_leaves_nothing_under_way(open_desk: OpenDesk) -> None:
    async def never(request: httpx.Request) -> None:
        await asyncio.Event().wait()

    provider = Provider(never)
    hint_service = open_desk(provider)
    writing = asyncio.create_task(hint_service.write([question(1)]))
    await provider.asked.wait()
    await hint_service.aclose()
    with pytest.raises(ClientClosed):
        await writing
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_file_that_is_no_cache_is_named_with_the_repair(tmp_path: Path) -> None:
    path = tmp_path / "hints.sqlite"
    path.write_text("not a database, but long enough to be read as one" * 40)
    with pytest.raises(StoreError, match=r"hints\.sqlite cannot keep hints .*llm\.cache"):
        HintCache(path)


async def test_a_cache_that_breaks_costs_neither_the_run_nor_more_money(
    open_desk: OpenDesk,
) -> None:
    provider = Provider()
    hint_service = open_desk(provider)
    hint_service.cache.close()
    (reply,) = await hint_service.write([question(1)])
    assert (reply.origin, reply.sent, provider.requests) == ("none", False, [])
    assert "cannot keep hints" in reply.reason


def test_two_runs_may_share_a_cache(tmp_path: Path) -> None:
    one, two = HintCache(tmp_path / "c"), HintCache(tmp_path / "c")
    one.put("k", "first")
    two.put("k", "second")
    assert one.get("k") == two.get("k") == "first"
    one.close()
    two.close()


def test_a_reply_without_words_says_why() -> None:
    assert HintReply("", "none").sent is False
