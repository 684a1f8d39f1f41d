"""The agent endpoint by the client of OpenAI: every API, streams, and what is captured.

The agent endpoint: what is refused, by its name, before anything is sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from agent_clients import OpenedAgent, opened_agent
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import ADD, ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text

QUESTION: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]


CALLS = f"<think>hm</think>so {call_text('add', {'a': 2})}{call_text('add', {'a': 3})}"


FLAT = {"type": "function", **ADD["function"], "strict": False}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@pytest.fixture
async def agent(chat: ChatFormat) -> AsyncIterator[OpenedAgent]:
    async with opened_agent(chat, CALLS, "it is 5", "yes") as agent:
        yield agent


def one_trajectory(agent: OpenedAgent) -> list[list[int]]:
    """The prompts of its turns, which must be what was sent to the generation."""
    (found,) = agent.episode.trajectories()
    prompts, ids = [], list[int]()
    for turn in found.turns:
        prompts.append([*ids, *turn.context_ids])
        ids = [*prompts[-1], *turn.action_ids]
    assert prompts == [request.prompt_ids for request in agent.generation.requests]
    assert [t.action_ids for t in found.turns] == [r.token_ids for r in agent.generation.results]
    return prompts


async def test_a_chat_with_tools_is_captured_as_one_conversation(agent: OpenedAgent) -> None:
    create = agent.client.chat.completions.create
    messages = list(QUESTION)
    first = (
        await create(model="any/name", messages=messages, tools=[ADD], temperature=0.3)
    ).choices
    assert first[0].finish_reason == "tool_calls"
    calls = first[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 2}, {"a": 3}]
    messages += [first[0].message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
    second = await create(model="any/name", messages=messages, tools=[ADD], logprobs=True)
    assert second.choices[0].message.content == "it is 5"
    assert second.choices[0].finish_reason == "stop"
    prompts = one_trajectory(agent)
    assert agent.generation.requests[0].temperature == 1.0
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(prompts[1])
    logprobs = second.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.logprob for one in logprobs.content] == agent.generation.results[1].logprobs


async def test_a_streamed_chat_is_the_same_conversation(agent: OpenedAgent) -> None:
    usage = {"include_usage": True}
    messages = list(QUESTION)
    async with agent.client.chat.completions.stream(
        model="m", messages=messages, tools=[ADD], stream_options=usage
    ) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.id == final.id for chunk in chunks)
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("so", "tool_calls")
    assert [json.loads(c.function.arguments) for c in message.tool_calls or []] == [
        {"a": 2},
        {"a": 3},
    ]
    echo = message.model_dump(exclude={"parsed"})
    for call in echo["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    messages += [echo, {"role": "user", "content": "and?"}]
    await agent.client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    assert len(one_trajectory(agent)) == 2


async def test_responses_with_calls_are_captured_as_one_conversation(agent: OpenedAgent) -> None:
    create = agent.client.responses.create
    items: list[Any] = list(QUESTION)
    first = await create(model="m", instructions="be brief", input=items, tools=[FLAT])
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    calls = [item for item in first.output if item.type == "function_call"]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    for call in calls:
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    second = await create(model="m", instructions="be brief", input=items, tools=[FLAT])
    assert second.output_text == "it is 5"
    assert second.usage is not None
    third = await create(
        model="m",
        instructions="be brief",
        previous_response_id=second.id,
        input="sure?",
        tools=[FLAT],
    )
    assert third.output_text == "yes"
    assert len(one_trajectory(agent)) == 3


async def test_streamed_responses_are_whole(agent: OpenedAgent) -> None:
    async with agent.client.responses.stream(model="m", input="2 + 3?", tools=[FLAT]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert final.output_text == "so"
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 2}, {"a": 3}]
    items: list[Any] = [item.model_dump(exclude_none=True) for item in final.output]
    for item in items:
        item.pop("parsed_arguments", None)
    again = [{"role": "user", "content": "2 + 3?"}, *items, *QUESTION]
    await agent.client.responses.create(model="m", input=again, tools=[FLAT])
    assert len(one_trajectory(agent)) == 2


async def test_a_tool_of_an_mcp_server_is_one_function_for_the_model_and_two_names_for_codex(
    chat: ChatFormat,
) -> None:
    inner = {"type": "function", "name": "add", "parameters": FLAT["parameters"]}
    agents = {"type": "namespace", "name": "agents", "tools": [{**inner, "name": "spawn"}]}
    broken = {"type": "namespace", "name": "mcp__broken", "tools": "add"}
    shorter = {"type": "namespace", "name": "mcp__ma", "tools": [inner, "add"]}
    longer = {"type": "namespace", "name": "mcp__ma__th", "tools": [inner]}
    tools: Any = [broken, shorter, longer, agents]
    async with opened_agent(chat, call_text("mcp__ma__th__add", {"a": 2}), "it is 5") as agent:
        create = agent.client.responses.create
        first = await create(model="m", input=QUESTION, tools=tools)
        call = first.output[0].model_dump(exclude_none=True)
        assert (call["type"], call["namespace"], call["name"]) == (
            *("function_call", "mcp__ma__th", "add"),
        )
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        second = await create(model="m", input=[*QUESTION, call, output], tools=tools)
        assert second.output_text == "it is 5"
        assert len(one_trajectory(agent)) == 2
        prompt = chat.tokenizer.decode(agent.generation.requests[0].prompt_ids)
        assert ("mcp__ma__th__add" in prompt, "spawn" in prompt) == (True, False)


async def test_what_codex_sends_is_answered(agent: OpenedAgent) -> None:
    tools: Any = [FLAT, {"type": "namespace", "name": "agents"}, {"type": "web_search"}]
    more = {"client_metadata": {"turn": "1"}, "include": ["reasoning.encrypted_content"]}
    found = await agent.client.responses.create(
        model="m", input=QUESTION, tools=tools, store=False, extra_body=more
    )
    assert [item.type for item in found.output].count("function_call") == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_continue_text_by_ids(agent: OpenedAgent, stream: bool) -> None:
    async def complete(prompt: str) -> str:
        found = await agent.client.completions.create(
            model="m", prompt=prompt, stream=stream, max_tokens=400
        )
        if not isinstance(found, openai.AsyncStream):
            return found.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in found])

    text = await complete("calcu")
    assert text == CALLS
    assert await complete(f"calcu{text}\nlator") == "it is 5"
    assert len(one_trajectory(agent)) == 2


async def test_completions_take_ids_and_return_them(agent: OpenedAgent) -> None:
    create = agent.client.completions.create
    ids = {"return_token_ids": True}
    first = await create(model="m", prompt=[5, 6], logprobs=0, extra_body=ids)
    sampled: list[int] = first.choices[0].token_ids  # type: ignore[attr-defined]
    logprobs = first.choices[0].logprobs
    assert sampled == agent.generation.results[0].token_ids
    assert logprobs is not None
    assert logprobs.token_logprobs == agent.generation.results[0].logprobs
    await create(model="m", prompt=[5, 6, *sampled, 7])
    assert len(one_trajectory(agent)) == 2


async def test_several_answers_to_one_request_are_branches(agent: OpenedAgent) -> None:
    found = await agent.client.chat.completions.create(model="m", messages=QUESTION, n=3)
    contents = [choice.message.content for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert contents == [CALLS.removeprefix("<think>hm</think>"), "it is 5", "yes"]
    assert [one.trained for one in agent.episode.trajectories()] == [[True]] * 3
    assert len({request.seed for request in agent.generation.requests}) == 3


async def test_a_stop_string_and_a_limit_end_an_answer(agent: OpenedAgent) -> None:
    create = agent.client.chat.completions.create
    stopped = await create(model="m", messages=QUESTION, stop=["so", "never"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")
    short = await create(model="m", messages=QUESTION, max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert agent.generation.requests[1].max_new_tokens == 2
    assert short.usage is not None
    assert short.usage.completion_tokens == 2


async def test_the_models_are_listed(agent: OpenedAgent) -> None:
    assert [model.id for model in (await agent.client.models.list()).data] == ["policy"]


async def test_a_prompt_without_room_for_an_answer_says_so(chat: ChatFormat) -> None:
    async with opened_agent(chat, "a", max_context=20) as agent:
        with pytest.raises(openai.BadRequestError) as raised:
            await agent.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "calculator " * 30}]
            )
        assert raised.value.code == "context_length_exceeded"


async def test_an_answer_has_what_is_left_of_the_context(chat: ChatFormat) -> None:
    prompt = len(chat.first_prompt(QUESTION))
    async with opened_agent(chat, "a b c d e f", max_context=prompt + 3) as agent:
        found = await agent.client.chat.completions.create(model="m", messages=QUESTION)
        assert found.choices[0].finish_reason == "length"
        assert agent.generation.requests[0].max_new_tokens == 3


async def test_a_request_after_the_end_of_its_episode_is_refused(chat: ChatFormat) -> None:
    generation, sample = ScriptedGeneration(chat, "a"), a_sample()
    async with AgentEndpoint(generation, chat, 500) as endpoint:
        async with endpoint.episode(sample, sample.sampling) as opened:
            pass
        async with openai.AsyncOpenAI(
            base_url=opened.base_url, api_key=opened.api_key, max_retries=0
        ) as client:
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(model="m", messages=QUESTION)
            assert raised.value.status_code == 410
            unknown = client.with_options(base_url=f"{opened.base_url[:-10]}/v1")
            with pytest.raises(openai.NotFoundError):
                await unknown.models.list()


async def test_nobody_reads_a_key_in_the_repr_of_an_episode(agent: OpenedAgent) -> None:
    assert agent.episode.api_key not in repr(agent.episode)


async def test_a_failed_generation_is_an_error_there_and_a_failure_here(chat: ChatFormat) -> None:
    async with opened_agent(chat, RuntimeError("no generator"), "fine") as agent:
        with pytest.raises(openai.InternalServerError) as raised:
            await agent.client.chat.completions.create(model="m", messages=QUESTION)
        assert "no generator" not in str(raised.value)
        (failure,) = agent.episode.failures()
        assert str(failure) == "no generator"
        assert agent.episode.trajectories() == []
        await agent.client.chat.completions.create(model="m", messages=QUESTION)
        assert agent.episode.failures() == []


async def test_a_lost_connection_ends_the_generation(chat: ChatFormat) -> None:
    async with opened_agent(chat, "a", retry_wait_s=0) as agent:
        agent.generation.open.clear()
        body = {"messages": QUESTION}
        asking = asyncio.create_task(agent.web.post("chat/completions", json=body))
        await agent.generation.asked.wait()
        asking.cancel()
        await agent.generation.gave_up.wait()
        assert agent.episode.trajectories() == []


async def test_a_retry_after_a_lost_connection_gets_the_answer_of_the_first(
    chat: ChatFormat,
) -> None:
    async with opened_agent(chat, "once", "twice") as agent:
        agent.generation.open.clear()
        body = {"messages": QUESTION}
        asking = asyncio.create_task(agent.web.post("chat/completions", json=body))
        await agent.generation.asked.wait()
        asking.cancel()
        retry = {"x-stainless-retry-count": "1"}
        again = asyncio.create_task(agent.web.post("chat/completions", json=body, headers=retry))
        agent.generation.open.set()
        assert (await again).json()["choices"][0]["message"]["content"] == "once"
        assert len(agent.generation.requests) == 1
        assert len(agent.episode.trajectories()) == 1


async def test_the_clients_own_retry_after_an_error_is_sampled(chat: ChatFormat) -> None:
    async with opened_agent(chat, RuntimeError("no generator"), "fine") as agent:
        client = agent.client.with_options(max_retries=1)
        found = await client.chat.completions.create(model="m", messages=QUESTION)
        assert found.choices[0].message.content == "fine"
        assert agent.episode.failures() == []


async def test_an_equal_request_after_an_answer_is_another_sample(agent: OpenedAgent) -> None:
    create = agent.client.chat.completions.create
    answers = [await create(model="m", messages=QUESTION) for _ in range(2)]
    assert answers[0].id != answers[1].id
    assert len(agent.episode.trajectories()) == 2


async def test_the_end_of_an_episode_ends_its_requests(chat: ChatFormat) -> None:
    generation, sample = ScriptedGeneration(chat, "a"), a_sample()
    generation.open.clear()
    async with AgentEndpoint(generation, chat, 500) as endpoint:
        async with endpoint.episode(sample, sample.sampling) as opened:
            client = openai.AsyncOpenAI(
                base_url=opened.base_url, api_key=opened.api_key, max_retries=0
            )
            asking = asyncio.create_task(
                client.chat.completions.create(model="m", messages=QUESTION)
            )
            await generation.asked.wait()
        with pytest.raises(openai.APIStatusError) as raised:
            await asking
        await client.close()
    assert raised.value.status_code == 410
    assert len(generation.cancelled) == 1


async def test_closing_the_endpoint_drops_the_requests_under_way(chat: ChatFormat) -> None:
    async with opened_agent(chat, "a") as agent:
        agent.generation.open.clear()
        asking = asyncio.create_task(
            agent.web.post("chat/completions", json={"messages": QUESTION})
        )
        await agent.generation.asked.wait()
        await agent.endpoint.close()
        with pytest.raises(httpx.HTTPError):
            await asking
    assert len(agent.generation.cancelled) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_its_name(
    agent: OpenedAgent, changes: dict[str, Any], param: str | None
) -> None:
    reply = await agent.web.post("chat/completions", json={"messages": QUESTION} | changes)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert agent.generation.requests == []


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"[]", b'{"messages": [1]}', b"\xff"])
async def test_a_body_that_is_no_request_is_refused(agent: OpenedAgent, body: bytes) -> None:
    for api in ("chat/completions", "completions", "responses"):
        reply = await agent.web.post(api, content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"]


async def test_the_key_of_one_episode_opens_no_other(agent: OpenedAgent) -> None:
    sample = a_sample(1)
    async with agent.endpoint.episode(sample, sample.sampling) as other:
        for key in (other.api_key, "x", "EMPTY"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"messages": QUESTION}
            reply = await agent.web.post("chat/completions", json=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert other.base_url != agent.episode.base_url
    assert agent.generation.requests == []
