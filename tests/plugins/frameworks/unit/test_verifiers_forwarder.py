"""The address that environments of verifiers ask: who is let through, and what is passed on.

Also docs/verifiers.md.
"""

import asyncio
import inspect
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_clients import OpenedAgent, opened_agent
from guides import Guide
from scripted_generation import a_sample

from composer_mesh.configs.load import read_table
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.frameworks.verifiers.driver_process import INFRASTRUCTURE
from composer_mesh.plugins.frameworks.verifiers.forwarder import Forwarder
from composer_mesh.plugins.frameworks.verifiers.workflow import VerifiersEnvironment
from composer_mesh.rollouts.chat import ChatFormat

QUESTION = {"messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
async def agent(tokenizer: Any) -> AsyncIterator[OpenedAgent]:
    async with opened_agent(ChatFormat(tokenizer, []), "one", "two", "three") as agent:
        yield agent


@pytest.fixture
async def forwarder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Forwarder]:
    monkeypatch.setenv(Forwarder.KEY_VARIABLE, "")
    async with Forwarder() as forwarder:
        yield forwarder


@pytest.fixture
async def web(forwarder: Forwarder) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {forwarder.key}"}
    async with httpx.AsyncClient(
        base_url=forwarder.base_url, headers=headers, trust_env=False
    ) as web:
        yield web


async def asked(web: httpx.AsyncClient, session: str, **headers: str) -> httpx.Response:
    return await web.post(
        "chat/completions", json=QUESTION, headers={"X-Session-ID": session, **headers}
    )


async def test_a_request_reaches_the_episode_of_its_session_until_that_is_closed(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    sample = a_sample(1)
    async with agent.endpoint.episode(sample, sample.sampling) as other:
        forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
        forwarder.open("b", other.base_url, other.api_key)
        for session in "ab":
            assert (await asked(web, session)).status_code == 200
        assert len(agent.episode.trajectories("a")) == len(other.trajectories("b")) == 1
        assert agent.episode.trajectories("b") == other.trajectories("a") == []
        forwarder.close("b")
        assert (await asked(web, "b")).status_code == 404


async def test_a_request_without_the_key_or_a_session_reaches_nothing(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
    for key in ("", "Bearer x", f"Bearer {agent.episode.api_key}"):
        assert (await asked(web, "a", Authorization=key)).status_code == 401
    for session in ("", "b"):
        assert (await asked(web, session)).status_code == 404
    assert agent.generation.requests == []


async def test_a_body_that_never_ends_is_refused(
    agent: OpenedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Forwarder.KEY_VARIABLE, "")
    async with Forwarder(body_s=0.1) as forwarder:
        forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
        address = httpx.URL(forwarder.base_url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: a\r\n"
            f"Authorization: Bearer {forwarder.key}\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert agent.generation.requests == []


async def test_a_stream_and_a_refusal_are_passed_on_as_they_are(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
    session = {"X-Session-ID": "a"}
    streamed = await web.post(
        "chat/completions", json={**QUESTION, "stream": True}, headers=session
    )
    assert streamed.headers["Content-Type"] == "text/event-stream"
    assert streamed.text.endswith("data: [DONE]\n\n")
    refused = await web.post(
        "chat/completions", json={**QUESTION, "guided_json": {}}, headers=session
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_json"
    (model,) = (await web.get("models")).json()["data"]
    assert model["max_model_len"] == 4000


async def test_an_endpoint_that_is_gone_is_an_error_that_may_be_tried_again(
    forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", "http://127.0.0.1:9/e/x/v1", "k")
    assert (await asked(web, "a")).status_code == 502


PAGE = Guide.read("verifiers.md")
RUN = Path(__file__).parents[1] / "verifiers" / "run.toml"
MOST_TOKENS = 4000


def test_its_config_is_one_and_names_options_that_exist() -> None:
    (text,) = PAGE.blocks("toml")
    table = tomllib.loads(text)
    config = Config.model_validate({"run": {"name": "page", "steps": 1}, **table})
    inspect.signature(VerifiersEnvironment).bind(**config.rollouts.options)
    assert config.rollouts.options["env"]["agent"]["max_total_tokens"] < MOST_TOKENS


def test_every_option_is_on_the_page_and_in_the_run_that_it_names() -> None:
    options = inspect.signature(VerifiersEnvironment).parameters
    assert {*options} - {"python"} <= set(PAGE.inline())
    assert "rollouts.options.python" in PAGE.inline()
    inspect.signature(VerifiersEnvironment).bind(**read_table(RUN)["rollouts"]["options"])


def test_every_class_of_infrastructure_is_on_the_page() -> None:
    assert set(PAGE.inline()) >= INFRASTRUCTURE
