"""Lost messages of calls, and a process that can no longer serve: no caller waits for ever."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import Channel

from composer_mesh.mesh import call_stream
from composer_mesh.mesh.call_stream import CALL, CallStream, StreamServer
from composer_mesh.mesh.message_batcher import Item
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded

BOUND_S = 60.0


class Unanswerable(BaseException):
    """An error that is no answer, as of a call that ends in want of memory."""


async def test_a_call_that_cannot_be_answered_is_reported_as_a_failure_of_the_process() -> None:
    failures: asyncio.Queue[BaseException] = asyncio.Queue()

    async def fails(*_: Any) -> None:
        raise Unanswerable

    answers, _receiver = Channel[list[Item]].open()
    calls = StreamServer(lambda _: fails, failures.put_nowait).open("caller", answers)
    calls.send([(0, CALL, pickle.dumps(("say", ())))])
    async with asyncio.timeout(BOUND_S):
        assert isinstance(await failures.get(), Unanswerable)


class Opens:
    """An actor's reference whose first `lost` requests to open calls are never answered."""

    def __init__(self, lost: float) -> None:
        self.asked, self._lost = 0, lost
        self.server = StreamServer(lambda _: self._say, self._failed)
        self.open_calls = SimpleNamespace(call_one=self._open)

    def _open(self, *args: Any) -> Any:
        self.asked += 1
        answer = asyncio.get_running_loop().create_future()
        if self.asked > self._lost:
            answer.set_result(self.server.open(*args))
        return SimpleNamespace(as_asyncio=lambda: answer)

    async def _say(self, words: str) -> str:
        return words

    def _failed(self, error: BaseException) -> None:
        raise error


async def test_an_actor_is_asked_again_where_no_answer_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "OPEN_AGAIN_S", 0.05)
    ref = Opens(lost=2)
    calls = CallStream("caller", "actor", ref, failed=pytest.fail)
    async with asyncio.timeout(BOUND_S):
        assert await calls.call("say", "hello") == "hello"
        assert ref.asked == 3
    await calls.close()
    await ref.server.hang_up("caller")


async def test_an_actor_that_takes_no_calls_is_reported_and_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "OPEN_AGAIN_S", 0.05)
    monkeypatch.setattr(call_stream, "OPEN_DEADLINE_S", 0.3)
    failures: asyncio.Queue[BaseException] = asyncio.Queue()
    ref = Opens(lost=float("inf"))
    calls = CallStream("caller", "actor", ref, failed=failures.put_nowait)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ActorDied, match=r"open_calls gave no answer within 0\.3 s"):
            await calls.call("say", "hello")
        assert isinstance(await failures.get(), DeadlineExceeded)
    assert ref.asked == 3  # after 0.05, 0.1 and the rest
    await calls.close()


async def test_what_a_caller_opened_before_is_dropped_when_it_opens_again() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = StreamServer(lambda _: hangs, lambda error: pytest.fail(str(error)))
    answers, _receiver = Channel[list[Item]].open()
    server.open("caller", answers).send([(0, CALL, pickle.dumps(("hangs", ())))])
    async with asyncio.timeout(BOUND_S):
        await started.wait()
        server.open("caller", answers)
        await ended.wait()
    assert server.running == 0
    await server.hang_up("caller")
