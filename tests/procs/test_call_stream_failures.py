"""Lost messages of calls, and a process that can no longer serve: no caller waits for ever."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import Channel

from composer_mesh.mesh import call_stream
from composer_mesh.mesh.call_server import CALL, Item
from composer_mesh.mesh.call_stream import CallStream, StreamServer
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded

BOUND_S = 60.0


class NoMemory(BaseException):
    """What ends the packing of an answer."""


class Unanswerable(Exception):
    """An error that cannot be packed for its caller."""

    def __reduce__(self) -> Any:
        raise NoMemory


async def test_a_call_that_cannot_be_answered_is_reported_as_a_failure_of_the_process() -> None:
    failures: asyncio.Queue[BaseException] = asyncio.Queue()

    async def fails(*_: Any) -> None:
        raise Unanswerable

    answers, _receiver = Channel[list[Item]].open()
    calls = StreamServer(lambda _: fails, failures.put_nowait).open("caller", answers)
    calls.send([(0, CALL, pickle.dumps(("say", ())))])
    async with asyncio.timeout(BOUND_S):
        assert isinstance(await failures.get(), NoMemory)


class Silent:
    """A reference to a living actor, to which no message comes through."""

    def __init__(self) -> None:
        self.open_calls = SimpleNamespace(call_one=self._open)

    def _open(self, *_: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        return SimpleNamespace(as_asyncio=lambda: answer)


async def test_an_actor_that_takes_no_calls_is_a_failure_of_the_process_and_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "OPEN_DEADLINE_S", 0.3)
    failures: asyncio.Queue[BaseException] = asyncio.Queue()
    calls = CallStream("caller", "actor", Silent(), failed=failures.put_nowait)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ActorDied, match=r"open_calls gave no answer within 0\.3 s"):
            await calls.call("say", "hello")
        assert isinstance(await failures.get(), DeadlineExceeded)
    await calls.close()
