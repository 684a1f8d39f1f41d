"""Questions to a host that never answers: they end with it, and its processes count until then.

A host downloads the models that a run names by their ids, and says why one could not be.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.hosts.agent import HostAgent
from composer_mesh.mesh.hosts.remote import RemoteHost
from composer_mesh.mesh.supervision import HostLost
from composer_mesh.planning import hub


class Silent:
    """An agent that hears everything and answers nothing, after it has failed so many times."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.failures = 0

    def __getattr__(self, endpoint: str) -> Any:
        return _Endpoint(self, endpoint)


class _Endpoint:
    def __init__(self, agent: Silent, name: str) -> None:
        self._agent, self._name = agent, name

    def call_one(self, *_: Any) -> _Endpoint:
        self._agent.heard.put_nowait(self._name)
        return self

    def as_asyncio(self) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._agent.failures:
            self._agent.failures -= 1
            answer.set_exception(ConnectionError("the network is down"))
        return answer


@pytest.fixture
async def host() -> RemoteHost:
    host = RemoteHost("host-0", "tls://10.0.0.5:22300", lease_s=15.0, note_late=print)
    host._agent = Silent()
    return host


async def test_a_question_ends_when_the_host_is_lost(host: RemoteHost) -> None:
    asking = asyncio.create_task(host.ask("about"))
    assert await host._agent.heard.get() == "about"
    host.lose("it was switched off")
    with pytest.raises(HostLost, match="it was switched off"):
        await asking


async def test_a_kill_that_nobody_confirms_lasts_until_the_host_is_lost(host: RemoteHost) -> None:
    host._agent.failures = 1
    killing = asyncio.create_task(host.kill([4711]))
    assert await host._agent.heard.get() == "kill"
    assert await host._agent.heard.get() == "kill"
    assert not killing.done()
    host.lose("it was switched off")
    await killing


NAMED = HubId("acme/tiny", "main")


@pytest.fixture
def agent() -> HostAgent:
    return object.__new__(HostAgent)  # the endpoint needs none of what its process gives it


async def test_a_model_is_downloaded_into_the_cache_that_the_run_names(
    agent: HostAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(hub, "whole_model", lambda *given: asked.append(given))
    assert await own_endpoint(agent, "fetch_model")(NAMED, "policy.path", tmp_path) == ""
    assert asked == [(NAMED, "policy.path", tmp_path)]


async def test_a_download_that_fails_is_an_answer(
    agent: HostAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("policy.path names acme/tiny, which is private: set HF_TOKEN")

    monkeypatch.setattr(hub, "whole_model", refuse)
    why = await own_endpoint(agent, "fetch_model")(NAMED, "policy.path", tmp_path)
    assert why == "policy.path names acme/tiny, which is private: set HF_TOKEN"
