"""Calls that arrive at an actor in batches: each is answered once, and none outlives its caller.

Calls between two processes over sockets: both ways, each answered once, all lost together.

Batches of items: the first goes at once, those that follow together, none is too large.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fake_host import turns
from raised_kinds import NAMES, raised

from composer_mesh.mesh.call_server import (
    CALL,
    CANCEL,
    ERROR,
    FEW,
    LOAD,
    LONGEST_WAIT_S,
    MESSAGE_BYTES,
    RESULT,
    SHARE,
    Endpoint,
    Item,
    MessageBatcher,
    PipeCallFailed,
    PipeCalls,
    messages_of,
    tick_of,
    until_next,
)
from composer_mesh.mesh.call_server import current_caller as caller_of_call
from composer_mesh.mesh.call_stream import StreamServer


class Foreign(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, one: str, *, two: str) -> None:
        super().__init__(one)
        self.two = two


class Actor:
    """Endpoints by name; `ended` are the calls of `hang` that were cancelled."""

    def __init__(self) -> None:
        self.started, self.ended = 0, 0

    def __call__(self, name: str) -> Callable[..., Awaitable[Any]]:
        found: Callable[..., Awaitable[Any]] = getattr(self, name)
        return found

    async def add(self, one: int, two: int) -> int:
        return one + two

    async def caller(self) -> str:
        return caller_of_call.get()

    async def hang(self) -> None:
        self.started += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    async def fail_foreign(self) -> None:
        raise Foreign("one", two="two")

    async def unsendable(self) -> Any:
        return lambda: None


def call(number: int, endpoint: str, *args: Any) -> Item:
    return (number, CALL, pickle.dumps((endpoint, args)))


def cancel(number: int) -> Item:
    return (number, CANCEL, b"")


def serving(actor: Actor, **callers: Callable[[list[Item]], None]) -> StreamServer:
    """A server that answers callers by functions; it fails the test where it cannot answer."""

    def failed(error: BaseException) -> None:
        raise error

    server = StreamServer(actor, failed)
    for caller, send in callers.items():
        server.answer_to(caller, send)
    return server


def nowhere(_: list[Item]) -> None:
    """Answers that nobody looks at."""


async def answered(*items: Item) -> dict[int, tuple[str, Any]]:
    """Return the answers to one message."""
    sent: list[Item] = []
    server = serving(Actor(), caller=sent.extend)
    server.take("caller", list(items))
    await turns()
    return {n: (kind, pickle.loads(found)) for n, kind, found in sent if kind != LOAD}


async def test_each_call_is_answered_under_its_number() -> None:
    found = await answered(call(3, "add", 1, 2), call(4, "add", 5, 6), call(5, "caller"))
    assert found == {3: (RESULT, 3), 4: (RESULT, 11), 5: (RESULT, "caller")}


async def test_an_exception_that_cannot_be_rebuilt_arrives_as_its_traceback() -> None:
    ((kind, (raised, text)),) = (await answered(call(0, "fail_foreign"))).values()
    assert (kind, raised) == (ERROR, None)
    assert "Foreign: one" in text


async def test_a_result_that_cannot_be_sent_and_an_unknown_endpoint_are_errors() -> None:
    found = await answered(call(0, "unsendable"), call(1, "nothing"))
    assert [kind for kind, _ in found.values()] == [ERROR, ERROR]


async def test_a_cancelled_call_is_cancelled_here_and_never_answered() -> None:
    actor, sent = Actor(), list[Item]()
    server = serving(actor, a=sent.extend)
    server.take("a", [call(0, "hang")])
    await turns()
    assert (actor.started, server.running) == (1, 1)
    server.take("a", [cancel(0)])
    await turns()
    assert (actor.ended, server.running, sent) == (1, 0, [])


async def test_a_call_that_is_cancelled_in_its_own_message_counts_as_running_no_more() -> None:
    actor, sent = Actor(), list[Item]()
    server = serving(actor, a=sent.extend)
    server.take("a", [call(0, "hang"), cancel(0)])
    await turns()
    assert (actor.started, server.running, sent) == (0, 0, [])


async def test_the_calls_of_a_dead_caller_end_and_those_of_others_go_on() -> None:
    actor = Actor()
    server = serving(actor, a=nowhere, b=nowhere)
    for caller in ("a", "b"):
        server.take(caller, [call(0, "hang"), call(1, "hang")])
    await turns()
    await server.close_calls("a")
    await server.close_calls("unknown")
    assert (actor.ended, server.running) == (2, 2)
    await server.close_calls("b")


async def test_every_message_says_how_many_calls_of_others_are_unanswered() -> None:
    sent = list[Item]()
    server = serving(Actor(), other=nowhere, a=sent.extend)
    server.take("other", [call(0, "hang"), call(1, "hang")])
    server.take("a", [call(0, "add", 1, 1), call(1, "hang")])
    await turns()
    assert sent[0] == (2, LOAD, b"")
    await server.close_calls("a")
    await server.close_calls("other")


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
    with pytest.raises((PipeCallFailed, RuntimeError), match=name) as failed:
        await ends[0].calls.call("raise_kind", name)
    assert "in raise_kind" in f"{failed.value} {failed.value.__cause__}"


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


def item(number: int, size: int = 1) -> Item:
    return (number, "call", b"x" * size)


def numbers(messages: list[list[Item]]) -> list[list[int]]:
    return [[number for number, *_ in message] for message in messages]


async def test_items_of_one_turn_of_the_loop_share_a_message_which_goes_at_once() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.add(item(0))
    batcher.add(item(1))
    await turns()
    assert numbers(sent) == [[0, 1]]


async def test_items_that_follow_a_message_wait_for_the_pause_and_share_the_next() -> None:
    sent: asyncio.Queue[list[Item]] = asyncio.Queue()
    batcher = MessageBatcher(sent.put_nowait)
    batcher.add(item(0))
    assert numbers([await sent.get()]) == [[0]]
    batcher.add(item(1))
    await asyncio.sleep(0)
    batcher.add(item(2))
    assert numbers([await sent.get()]) == [[1, 2]]


def test_items_that_wait_for_a_tick_are_sent_with_all_others_before_it() -> None:
    ends = {now + until_next(now, 0.0, 0.25) for now in (10.01, 10.1, 10.2499)}
    assert ends == {10.25}
    assert until_next(10.01, earliest=10.02, tick_s=0.0) == pytest.approx(0.01)


async def test_an_item_goes_at_once_again_when_few_calls_are_left() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.took(3600.0, unanswered=FEW + 1)
    batcher.took(3600.0, unanswered=FEW)
    batcher.add(item(0))
    await turns()
    assert numbers(sent) == [[0]]


@pytest.mark.parametrize("call_s", [0.001, 0.3, 0.5, 1.7, 17.0, 3600.0])
@pytest.mark.parametrize("longest_s", [0.002, 0.03, LONGEST_WAIT_S])
def test_a_tick_is_a_small_share_of_a_call_and_coincides_with_every_shorter_one(
    call_s: float, longest_s: float
) -> None:
    tick = tick_of(call_s, FEW + 1, longest_s)
    assert tick <= min(SHARE * call_s, longest_s)
    assert not tick or LONGEST_WAIT_S % tick == 0
    assert tick_of(call_s, FEW, longest_s) == 0


async def test_a_closed_batcher_sends_nothing() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.add(item(0))
    batcher.close()
    await turns()
    assert sent == []


def test_a_message_is_no_larger_than_its_bound_unless_one_item_is() -> None:
    half, large = MESSAGE_BYTES // 2, 3 * MESSAGE_BYTES
    items = [item(0, half), item(1, half), item(2), item(3, large), item(4), item(5, 0)]
    assert numbers(messages_of(items)) == [[0, 1], [2], [3], [4, 5]]
