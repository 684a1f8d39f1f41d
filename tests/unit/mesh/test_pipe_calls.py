"""Calls between two processes over sockets: both ways, each answered once, all lost together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from raised_kinds import NAMES, raised

from composer_mesh.mesh.call_server import Endpoint, PipeCallFailed, PipeCalls


class End:
    """One end and its endpoints."""

    def __init__(self, connection: socket.socket) -> None:
        self.gone, self.cancelled = asyncio.Event(), asyncio.Event()
        self.started = asyncio.Event()
        self.calls = PipeCalls(connection, self.endpoint, self.gone.set, self.failed)

    def endpoint(self, name: str) -> Endpoint:
        found: Callable[..., Awaitable[Any]] = getattr(self, name)
        return found

    def failed(self, error: BaseException) -> None:
        raise error

    async def add(self, one: int, two: int) -> int:
        return one + two

    async def raise_kind(self, name: str) -> None:
        raise raised(name)

    async def fail(self) -> None:
        raise KeyError("no such row")

    async def hang(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = (End(one) for one in socket.socketpair())
    for end in (ours, theirs):
        await end.calls.open()
    yield ours, theirs
    for end in (ours, theirs):
        await end.calls.close()


async def test_both_ends_call_and_large_answers_arrive_whole(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    assert await ours.calls.call("add", 1, 2) == 3
    assert await theirs.calls.call("add", [1] * 300_000, [2]) == [1] * 300_000 + [2]
    assert not ours.calls.unanswered


async def test_an_exception_arrives_with_the_traceback_of_the_other_end(
    ends: tuple[End, End],
) -> None:
    with pytest.raises(KeyError, match="no such row") as failed:
        await ends[0].calls.call("fail")
    assert "in fail" in str(failed.value.__cause__)


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_no_exception_is_answered_as_a_failure_that_names_it(
    name: str, ends: tuple[End, End]
) -> None:
    with pytest.raises((PipeCallFailed, RuntimeError), match=name):
        await ends[0].calls.call("raise_kind", name)


async def test_a_cancelled_call_is_cancelled_at_the_other_end(ends: tuple[End, End]) -> None:
    calling = asyncio.create_task(ends[0].calls.call("hang"))
    await ends[1].started.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await ends[1].cancelled.wait()


async def test_calls_of_a_lost_end_and_later_ones_have_the_error_of_their_number(
    ends: tuple[End, End],
) -> None:
    ours, theirs = ends
    calling = asyncio.create_task(ours.calls.call("hang"))
    await theirs.started.wait()
    ((number, one),) = ours.calls.unanswered.items()
    assert one.endpoint == "hang"
    await theirs.calls.close()
    await ours.gone.wait()
    ours.calls.end_calls(lambda lost, _: LookupError(lost - number))
    for expected, call in enumerate((calling, ours.calls.call("add", 1, 2))):
        with pytest.raises(LookupError) as failed:
            await call
        assert failed.value.args == (expected,)
