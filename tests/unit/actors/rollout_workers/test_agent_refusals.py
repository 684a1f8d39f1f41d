"""The agent endpoint: what is refused, by its name, before anything is sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_clients import OpenedAgent, opened_agent
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import a_sample

from composer_mesh.rollouts.chat import ChatFormat

QUESTION: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]


@pytest.fixture
async def agent(tokenizer: Any) -> AsyncIterator[OpenedAgent]:
    chat = ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])
    async with opened_agent(chat) as agent:
        yield agent


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
