"""`/inference/v1/generate` and sessions: the ids that are given and returned are those captured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_clients import OpenedAgent, opened_agent
from agent_templates import FAMILIES
from chat_templates import with_template

from composer_mesh.rollouts.chat import ChatFormat

RECORDED = json.loads((Path(__file__).parent / "verifiers_requests.json").read_text())
"""What the clients of verifiers 0.4.0 sent (plugins/frameworks/verifiers compares them)."""


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@pytest.fixture
async def agent(chat: ChatFormat) -> AsyncIterator[OpenedAgent]:
    async with opened_agent(chat, "so 5", "it is 5", "yes") as agent:
        yield agent


async def generated(
    agent: OpenedAgent, ids: list[int], session: str = "", status: int = 200, **sampling: Any
) -> dict[str, Any]:
    url = agent.episode.base_url.removesuffix("/v1") + "/inference/v1/generate"
    body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, **sampling}}
    reply = await agent.web.post(url, json=body, headers={"X-Session-ID": session})
    assert reply.status_code == status, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def test_the_ids_that_are_given_and_returned_are_those_that_are_trained(
    agent: OpenedAgent,
) -> None:
    first = await generated(agent, [5, 6])
    (choice,) = first["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{one}" for one in choice["token_ids"]
    ]
    assert choice["finish_reason"] == "stop"
    prompt = [5, 6, *choice["token_ids"], 7]
    second = await generated(agent, prompt)
    (found,) = agent.episode.trajectories()
    assert [turn.context_ids for turn in found.turns] == [[5, 6], [7]]
    assert [turn.action_ids for turn in found.turns] == [
        choice["token_ids"],
        second["choices"][0]["token_ids"],
    ]
    assert found.turns[0].logprobs == logprobs
    assert [request.prompt_ids for request in agent.generation.requests] == [[5, 6], prompt]
    assert first["usage"]["prompt_tokens"] == 2


async def test_a_prompt_of_ids_that_extends_nothing_is_a_new_beginning(agent: OpenedAgent) -> None:
    first = (await generated(agent, [5, 6]))["choices"][0]["token_ids"]
    await generated(agent, [5, 7, *first])
    found = agent.episode.trajectories()
    assert [[turn.context_ids for turn in one.turns] for one in found] == [
        [[5, 6]],
        [[5, 7, *first]],
    ]


async def test_the_same_ids_of_another_session_are_another_conversation(
    agent: OpenedAgent,
) -> None:
    first = (await generated(agent, [5, 6], "one"))["choices"][0]["token_ids"]
    await generated(agent, [5, 6, *first, 7], "two")
    (one,) = agent.episode.trajectories("one")
    (two,) = agent.episode.trajectories("two")
    assert [turn.context_ids for turn in one.turns] == [[5, 6]]
    assert [turn.context_ids for turn in two.turns] == [[5, 6, *first, 7]]
    assert agent.episode.trajectories() == [one, two]
    assert agent.episode.trajectories("three") == []


async def test_a_limit_several_answers_and_stop_ids_are_kept(agent: OpenedAgent) -> None:
    stop = agent.generation.chat.stop_ids[0]
    found = await generated(agent, [5], n=2, max_tokens=1, stop_token_ids=[stop, 9])
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    assert agent.generation.requests[0].stop_ids == [stop, 9]
    assert agent.generation.requests[0].max_new_tokens == 1
    assert [one.trained for one in agent.episode.trajectories()] == [[True], [True]]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 5}, "sampling_params"),
        ({"guided_json": {}}, "guided_json"),
        ({"n": 65}, "sampling_params"),
        ({"stop_token_ids": [1] * 257}, "sampling_params"),
        ({"stop_token_ids": ["1"]}, "sampling_params"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_its_name(
    agent: OpenedAgent, sampling: dict[str, Any], param: str
) -> None:
    reply = await generated(agent, [5], status=400, **sampling)
    assert reply["error"]["param"] == param
    assert agent.generation.requests == []


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True},
        {"features": {"mm_hashes": {}}},
        {"token_ids": []},
        {"token_ids": [1.5]},
        {"token_ids": [10**6]},
        {"sampling_params": None},
        {"surprise": 1},
    ],
)
async def test_a_request_that_is_no_list_of_ids_is_refused(
    agent: OpenedAgent, change: dict[str, Any]
) -> None:
    url = agent.episode.base_url.removesuffix("/v1") + "/inference/v1/generate"
    body = {"model": "m", "token_ids": [5], "sampling_params": {}}
    reply = await agent.web.post(url, json=body | change)
    assert reply.status_code == 400
    long = await agent.web.post(url, json=body, headers={"X-Session-ID": "s" * 257})
    assert long.status_code == 400
    stranger = await agent.web.post(url, json=body, headers={"Authorization": "Bearer x"})
    assert stranger.status_code == 401
    assert agent.generation.requests == []


async def test_the_length_of_the_context_is_told(agent: OpenedAgent) -> None:
    (model,) = (await agent.web.get("models")).json()["data"]
    assert model["max_model_len"] == 4000


@pytest.mark.parametrize("name", RECORDED)
async def test_what_the_clients_of_verifiers_send_is_answered_as_they_read_it(
    agent: OpenedAgent, name: str
) -> None:
    sent = RECORDED[name]
    url = agent.episode.base_url.removesuffix("/v1") + sent["path"]
    reply = await agent.web.post(url, json=sent["body"], headers=sent["headers"])
    assert reply.status_code == 200, reply.text
    if sent["body"].get("stream"):
        events = reply.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] > 0
    else:
        assert set(sent["answer_keys"]) <= reply.json().keys()
    assert len(agent.episode.trajectories(sent["headers"]["x-session-id"])) == 1
