"""The hint writer against a scripted provider: what is paid, what is kept, what is given up."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.panel_actors import hint_reply
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.services.replay.teacher_settings import HINT_BREAKER, hint_settings

Answer = Callable[[httpx.Request], Any]
OpenWriter = Callable[..., Awaitable[TeacherPanel]]


def said(text: Any, usd: float | None = 0.001) -> httpx.Response:
    usage = {} if usd is None else {"usage": {"cost": usd}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return httpx.Response(200, json={"choices": [choice], **usage})


def costs(usd: float | None) -> Answer:
    return lambda _: said("Word.", usd)


def question(number: int) -> HintRequest:
    return HintRequest([{"role": "user", "content": f"error {number}"}])


def spent(panel: TeacherPanel) -> float:
    return float(panel.details()["budget"]["spent_usd"])


async def write(panel: TeacherPanel, numbers: Iterable[int]) -> list[HintReply]:
    asking = (panel.ask_one("hint writer", question(n).messages) for n in numbers)
    return [hint_reply(reply) for reply in await asyncio.gather(*asking)]


class Provider:
    """Answers each request with a text of its own; remembers how many it got."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.requests: list[Any] = []
        self._answer = answer or (lambda request: said(f"Word {len(self.requests)}."))

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        found = self._answer(request)
        return await found if asyncio.iscoroutine(found) else found


@pytest.fixture
async def open_writer(tmp_path: Path, build_config: Any) -> AsyncIterator[OpenWriter]:
    panels: list[TeacherPanel] = []

    async def open_one(provider: Provider, run: str = "run", **keys: Any) -> TeacherPanel:
        url = f"https://writer-{len(panels)}.test/v1"
        llm = {"kind": "openai", "base_url": url, "model": "some/model"}
        llm |= {"cache": str(tmp_path / "hints.sqlite"), **keys}
        config = build_config(sdpo={"alpha": 0.1, "hints": {"writer": "llm", "llm": llm}})
        settings = hint_settings(config, "", tmp_path / run)
        transport = httpx.MockTransport(provider)
        panels.append(await TeacherPanel.open(settings, environ={}, transport=transport))
        return panels[-1]

    yield open_one
    for panel in panels:
        await panel.aclose()


async def test_words_come_back_in_the_order_of_the_questions(open_writer: OpenWriter) -> None:
    provider = Provider(lambda request: said(json.loads(request.content)["messages"][0]["content"]))
    replies = await write(await open_writer(provider), range(20))
    assert [reply.text for reply in replies] == [f"error {n}" for n in range(20)]
    assert {(reply.origin, reply.sent, reply.usd) for reply in replies} == {("llm", True, 0.001)}
    assert provider.requests[0]["model"] == "some/model"


async def test_a_repeated_run_pays_nothing_at_whatever_url(open_writer: OpenWriter) -> None:
    provider = Provider()
    first = await write(await open_writer(provider), range(3))
    again = await open_writer(provider, "another", budget_requests=1)
    second = await write(again, range(3))
    assert [reply.text for reply in second] == [reply.text for reply in first]
    assert [(reply.origin, reply.sent, reply.usd) for reply in second] == [("cached", False, 0)] * 3
    assert (len(provider.requests), (await again.report()).run.requests) == (3, 0)
    other = await open_writer(provider, "third", model="other/model")
    assert [reply.origin for reply in await write(other, range(1))] == ["llm"]


async def test_equal_questions_at_the_same_time_are_paid_once(open_writer: OpenWriter) -> None:
    provider = Provider()
    replies = await write(await open_writer(provider), [1, 1, 1])
    assert len(provider.requests) == 1
    assert sorted(reply.origin for reply in replies) == ["cached", "cached", "llm"]
    assert sum(reply.usd for reply in replies) == pytest.approx(0.001)
    down = await open_writer(Provider(lambda _: httpx.Response(500)), "another")
    assert sorted(reply.sent for reply in await write(down, [2, 2])) == [False, True]


async def test_requests_end_with_their_budget(open_writer: OpenWriter) -> None:
    provider = Provider()
    replies = await write(await open_writer(provider, budget_requests=2), range(5))
    assert sum(reply.sent for reply in replies) == len(provider.requests) == 2
    refused = {reply.reason for reply in replies if reply.origin == "none"}
    assert refused == {
        "budget: model 'hint writer': all 2 requests of the run are spent: "
        "raise sdpo.hints.llm.budget_requests or sdpo.hints.llm.budget_usd"
    }


@pytest.mark.parametrize("limit", [{"budget_requests": 2}, {"budget_usd": 0.002}])
async def test_a_resumed_run_has_no_new_budget(
    open_writer: OpenWriter, limit: dict[str, Any]
) -> None:
    provider = Provider()
    first = await open_writer(provider, **limit)
    assert [reply.sent for reply in await write(first, [0])] == [True]
    await first.aclose()
    resumed = await open_writer(provider, **limit)
    assert sum(reply.sent for reply in await write(resumed, range(1, 4))) == 1
    assert (await resumed.report()).run.requests == len(provider.requests) == 2


async def test_an_unknown_price_is_charged_as_assumed(open_writer: OpenWriter) -> None:
    provider = Provider(costs(None))
    replies = await write(
        await open_writer(provider, budget_usd=0.005, assumed_usd=0.002), range(9)
    )
    assert len(provider.requests) == 2
    assert sum(reply.usd for reply in replies) == pytest.approx(0.004)


async def test_free_answers_need_no_dollars(open_writer: OpenWriter) -> None:
    panel = await open_writer(Provider(costs(0.0)), budget_usd=0.0, assumed_usd=0.0)
    assert {reply.origin for reply in await write(panel, range(9))} == {"llm"}


async def test_a_provider_that_fails_in_a_row_is_left_alone_for_a_while(
    open_writer: OpenWriter,
) -> None:
    provider = Provider(lambda request: httpx.Response(500, json={"error": {"message": "no"}}))
    replies = await write(await open_writer(provider, max_concurrent=1), range(20))
    assert len(provider.requests) == HINT_BREAKER.failures
    assert {reply.origin for reply in replies} == {"none"}
    assert "failed in a row" in replies[-1].reason


@pytest.mark.parametrize("text", ["", "  ", "\x00\x1f", "<tool_call>\n{}\n</tool_call>"])
async def test_an_answer_that_is_no_plain_text_is_paid_once_and_never_shown(
    open_writer: OpenWriter, text: str
) -> None:
    provider = Provider(lambda request: said(text))
    panel = await open_writer(provider)
    (reply,) = await write(panel, [1])
    assert (reply.text, reply.origin, reply.sent, reply.usd) == ("", "none", True, 0.001)
    (again,) = await write(panel, [1])
    assert (again.text, again.origin, again.sent, again.usd) == ("", "none", False, 0.0)
    assert len(provider.requests) == 1


async def test_a_cache_that_breaks_costs_neither_the_run_nor_more_money(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    provider = Provider()
    panel = await open_writer(provider)
    with sqlite3.connect(tmp_path / "hints.sqlite") as rows:
        rows.execute("DROP TABLE kept")
    rows.close()
    (reply,) = await write(panel, [1])
    assert (reply.origin, reply.sent, provider.requests) == ("none", False, [])
    assert "name another file with sdpo.hints.llm.cache" in reply.reason
