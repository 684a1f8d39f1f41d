"""Questions to a host that never answers: they end with it, and its processes count until then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from composer_mesh.mesh.hosts.remote import RemoteHost
from composer_mesh.mesh.supervision import HostLost


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
