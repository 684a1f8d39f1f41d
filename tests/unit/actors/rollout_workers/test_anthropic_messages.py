"""`/v1/messages` by the client of Anthropic: calls, streams, and what is captured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anthropic
import pytest
from agent_clients import OpenedAgent, opened_agent
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import ADD

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text

QUESTION: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]
CALLS = f"<think>hm</think>so {call_text('add', {'a': 2})}{call_text('add', {'a': 3})}"
FUNCTION = ADD["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@asynccontextmanager
async def opened(
    chat: ChatFormat, *texts: str | Exception, **settings: Any
) -> AsyncIterator[tuple[OpenedAgent, anthropic.AsyncAnthropic]]:
    async with opened_agent(chat, *texts, **settings) as agent:
        url, key = agent.episode.base_url.removesuffix("/v1"), agent.episode.api_key
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            yield agent, client


def only_prompts(agent: OpenedAgent) -> list[str]:
    """The texts of the prompts of one trajectory, each of which continues the ids before it."""
    (found,) = agent.episode.trajectories()
    ids, prompts = list[int](), []
    for turn in found.turns:
        ids = [*ids, *turn.context_ids]
        prompts.append(agent.generation.chat.tokenizer.decode(ids))
        ids = [*ids, *turn.action_ids]
    assert [len(request.prompt_ids) for request in agent.generation.requests] == [
        len(agent.generation.chat.tokenizer(prompt, add_special_tokens=False).input_ids)
        for prompt in prompts
    ]
    return prompts


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_captured_as_one(chat: ChatFormat, stream: bool) -> None:
    async def answer(messages: list[Any]) -> Any:
        given: Any = {
            "model": "any",
            "max_tokens": 50,
            "system": "be brief",
            "messages": messages,
            "tools": [TOOL],
        }
        if not stream:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as events:
            return await events.get_final_message()

    async with opened(chat, CALLS, "it is 5") as (agent, client):
        messages = list(QUESTION)
        first = await answer(messages)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "text", *["tool_use"] * 2]
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("add", {"a": 2}), ("add", {"a": 3})]
        content = [block.model_dump(exclude_none=True) for block in first.content]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls
        ]
        messages += [{"role": "assistant", "content": content}]
        messages += [{"role": "user", "content": [*results, {"type": "text", "text": "and?"}]}]
        second = await answer(messages)
        assert [(block.type, block.text) for block in second.content] == [("text", "it is 5")]
        assert second.stop_reason == "end_turn"
        usage = second.usage
        assert usage.input_tokens == len(agent.generation.requests[1].prompt_ids)
        assert usage.output_tokens == len(agent.generation.results[1].token_ids)
        assert agent.generation.requests[0].max_new_tokens <= 50
        last = only_prompts(agent)[1]
        assert "be brief" in last
        assert last.index("5") < last.index("and?")


async def test_system_messages_within_a_conversation_leave_it_one(chat: ChatFormat) -> None:
    """As Claude Code sends them: as blocks at first, and as one text afterwards."""
    reminder: Any = {
        "type": "text",
        "text": "use metric units",
        "cache_control": {"type": "ephemeral"},
    }
    first: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}],
        },
        {"role": "system", "content": [reminder]},
    ]
    again: list[Any] = [first[0], {"role": "system", "content": "use metric units"}]
    ask: Any = {"model": "m", "max_tokens": 9}
    async with opened(chat, "yes", "no") as (agent, client):
        await client.messages.create(**ask, messages=first)
        said: list[Any] = [{"role": "assistant", "content": "yes"}, *QUESTION]
        await client.messages.create(**ask, messages=[*again, *said])
        prompts = only_prompts(agent)
        assert len(prompts) == 2
        assert "one\n\n2\n\nuse metric units" in prompts[0]


async def test_tokens_are_counted_without_sampling(chat: ChatFormat) -> None:
    async with opened(chat, "yes") as (agent, client):
        count = await client.messages.count_tokens(model="m", messages=QUESTION, tools=[TOOL])
        assert agent.generation.requests == []
        found = await client.messages.create(
            model="m", max_tokens=9, messages=QUESTION, tools=[TOOL]
        )
        assert found.usage.input_tokens == count.input_tokens


async def test_the_sequence_that_ended_an_answer_is_named(chat: ChatFormat) -> None:
    async with opened(chat, "yes END more", "and so on") as (_, client):
        ask: Any = {"model": "m", "messages": QUESTION}
        found = await client.messages.create(**ask, max_tokens=50, stop_sequences=["END"])
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "END")
        assert (await client.messages.create(**ask, max_tokens=1)).stop_reason == "max_tokens"


async def test_what_no_prompt_holds_is_refused_and_what_changes_nothing_is_ignored(
    chat: ChatFormat,
) -> None:
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": ""},
    }
    searching: Any = {"type": "web_search_20250305", "name": "web_search"}
    async with opened(chat, "yes") as (agent, client):
        ask: Any = {"model": "m", "max_tokens": 9}
        for content in ([image], [{"type": "tool_result", "tool_use_id": "1", "content": [image]}]):
            with pytest.raises(anthropic.BadRequestError, match="type 'image', but the policy"):
                await client.messages.create(
                    **ask, messages=[cast(Any, {"role": "user", "content": content})]
                )
        parts = [{"type": "tool_result", "tool_use_id": "1", "content": ["no block"]}]
        with pytest.raises(anthropic.BadRequestError, match="type 'str', but the policy"):
            await client.messages.create(
                **ask, messages=[cast(Any, {"role": "user", "content": parts})]
            )
        more = {"thinking": {"type": "adaptive"}, "context_management": {}, "future": 1}
        await client.messages.create(
            **ask,
            messages=QUESTION,
            tools=[searching],
            extra_body=more,
            extra_query={"beta": "true"},
        )
        assert "web_search" not in only_prompts(agent)[0]


async def test_errors_have_the_form_of_the_protocol(chat: ChatFormat) -> None:
    async with opened(chat, RuntimeError("no generator")) as (agent, client):
        ask: Any = {"model": "m", "max_tokens": 9, "messages": QUESTION}
        with pytest.raises(anthropic.InternalServerError) as raised:
            await client.messages.create(**ask)
        assert raised.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        stranger = client.with_options(api_key="another")
        with pytest.raises(anthropic.AuthenticationError, match="send the API key"):
            await stranger.messages.create(**ask)
        assert len(agent.episode.failures()) == 1


@pytest.mark.parametrize("path", ["messages", "chat/completions", "responses"])
async def test_a_stream_begins_before_its_answer(chat: ChatFormat, path: str) -> None:
    body: Any = {"model": "m", "max_tokens": 9, "stream": True, "messages": QUESTION}
    if path == "responses":
        body = {"input": "hello", "stream": True}
    for said in ("yes", RuntimeError("no generator")):
        async with opened(chat, said, stream_wait_s=0.02) as (agent, _):
            agent.generation.open.clear()
            async with agent.web.stream("POST", path, json=body) as reply:
                assert reply.status_code == 200
                lines = reply.aiter_lines()
                assert await anext(lines) in ("event: ping", ": sampling")
                agent.generation.open.set()
                data = [line[6:] async for line in lines if line.startswith("data: ")]
            events = [json.loads(one) for one in data if one != "[DONE]"]
            failed = [one for one in events if one.get("error") or one.get("type") == "error"]
            assert bool(failed) == isinstance(said, Exception)
            assert len(agent.episode.trajectories()) == (not failed)
