"""Calls that arrive at an actor in batches: each is answered once, and none outlives its caller."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_host import turns
from raised_kinds import NAMES, raised

from composer_mesh.mesh.call_server import CALL, CANCEL, ERROR, LOAD, RESULT, Item
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

    async def fail(self) -> None:
        raise KeyError("no such row")

    async def fail_foreign(self) -> None:
        raise Foreign("one", two="two")

    async def raise_kind(self, name: str) -> None:
        raise raised(name)

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


async def test_an_exception_travels_with_its_traceback() -> None:
    ((kind, (raised, text)),) = (await answered(call(0, "fail"))).values()
    assert (kind, repr(raised)) == (ERROR, "KeyError('no such row')")
    assert "in fail" in text


async def test_an_exception_that_cannot_be_rebuilt_arrives_as_its_traceback() -> None:
    ((kind, (raised, text)),) = (await answered(call(0, "fail_foreign"))).values()
    assert (kind, raised) == (ERROR, None)
    assert "Foreign: one" in text


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_no_exception_is_answered_at_once_and_harms_no_caller(name: str) -> None:
    ((kind, (raised_there, text)),) = (await answered(call(0, "raise_kind", name))).values()
    assert (kind, "raise_kind" in text, name in text) == (ERROR, True, True)
    assert raised_there is None or isinstance(raised_there, Exception)


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
