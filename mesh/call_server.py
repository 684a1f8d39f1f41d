"""Calls that arrive at a process in messages: each runs in its own task and is answered once.

`call_stream` has the calls between actors, `pipe_calls` those between an actor and a process that
it has started. Imports nothing of Monarch.

Calls and answers are batched into few messages, which wait a small share of the time of a call:

    calls are few, or short     the first goes at once, those within `PAUSE_S` of it together
    many calls that take long   all go together at the next tick of the clock

A process spends about 0.3 ms of CPU on a message that wakes it, whatever it carries, and a third of
that on one that arrives together with others. Ticks are the same for all processes of a host.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from struct import Struct
from typing import Any

from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.tasks.calls import current_call, is_requested

PAUSE_S = 0.01
"""Least time between two messages of one batcher that has no tick."""

LONGEST_WAIT_S = 0.25
"""Longest time that an item waits, by default."""

SHARE = 1 / 64
"""Largest tick as a share of the time that a call takes."""

FEW = 8
"""Number of unanswered calls up to which there is no tick."""

WEIGHT = 0.05
"""Weight of the last call in the mean of their times."""

MESSAGE_BYTES = 1 << 18
"""Bytes after which a message ends, so that reading one never blocks a loop for long."""

Item = tuple[int, str, bytes]
"""Number of the call, what the item is, and its pickled contents."""


class MessageBatcher:
    """Collects items on one event loop; `send` gets the items of each message, in order."""

    def __init__(
        self, send: Callable[[list[Item]], None], longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._send, self._longest_wait_s = send, longest_wait_s
        self._items: list[Item] = []
        self._flushing: asyncio.Handle | None = None
        self._sent_at = float("-inf")
        self._call_s, self._tick_s = 0.0, 0.0

    def add(self, item: Item) -> None:
        """Queue an item; it is sent in this turn of the loop, after the pause, or at the tick."""
        self._items.append(item)
        if self._flushing is None:
            loop = asyncio.get_running_loop()
            earliest = self._sent_at + min(PAUSE_S, self._longest_wait_s)
            wait_s = until_next(loop.time(), earliest, self._tick_s)
            self._flushing = (
                loop.call_later(wait_s, self._flush) if wait_s > 0 else loop.call_soon(self._flush)
            )

    def took(self, seconds: float, unanswered: int) -> None:
        """Note how long a call took, while so many others are not answered yet."""
        self._call_s += WEIGHT * (seconds - self._call_s)
        self._tick_s = tick_of(self._call_s, unanswered, self._longest_wait_s)

    def close(self) -> None:
        """Drop what was not sent."""
        self._items = []
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    def _flush(self) -> None:
        items, self._items = self._items, []
        self._flushing, self._sent_at = None, asyncio.get_running_loop().time()
        for message in messages_of(items):
            self._send(message)


def tick_of(call_s: float, unanswered: int, longest_wait_s: float = LONGEST_WAIT_S) -> float:
    """Return the seconds between two ticks, 0 for none: a power of two, so that ticks coincide."""
    largest = min(SHARE * call_s, longest_wait_s)
    if unanswered <= FEW or largest <= PAUSE_S / 2:
        return 0.0
    return float(2.0 ** math.floor(math.log2(largest)))


def until_next(now: float, earliest: float, tick_s: float) -> float:
    """Return the seconds until the next tick, or until `earliest` where there are no ticks."""
    return -now % tick_s if tick_s else earliest - now


def messages_of(items: list[Item]) -> list[list[Item]]:
    """Split items into messages of at most `MESSAGE_BYTES`, or of one larger item."""
    messages: list[list[Item]] = []
    left = 0
    for item in items:
        size = len(item[2])
        if not messages or size > left:
            messages.append([])
            left = MESSAGE_BYTES
        messages[-1].append(item)
        left -= size
    return messages


CALL, CANCEL, RESULT, ERROR, LOAD = "call", "cancel", "result", "error", "load"

current_caller: ContextVar[str] = ContextVar("current_caller", default="")
"""Within an endpoint that was called by a message: the caller's name."""

Endpoint = Callable[..., Awaitable[Any]]


class CallServer:
    """Runs the calls of several callers; `endpoint` returns the coroutine function of a name.

    Whatever an endpoint raises is answered, so that nobody waits for a call that has ended.
    `failed` is called where calls can no longer be read or answered, for want of memory: their
    callers would wait forever.
    """

    def __init__(
        self, endpoint: Callable[[str], Endpoint], failed: Callable[[BaseException], None]
    ) -> None:
        self._endpoint, self._failed = endpoint, failed
        self._running: dict[str, dict[int, asyncio.Task[None]]] = {}
        self._answers: dict[str, MessageBatcher] = {}

    def answer_to(
        self,
        caller: str,
        send: Callable[[list[Item]], None],
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        """Answer a caller's calls in messages to `send`."""
        self._running[caller] = {}
        answer = partial(self._answer, caller, send)
        self._answers[caller] = MessageBatcher(answer, longest_wait_s)

    def take(self, caller: str, items: list[Item]) -> None:
        """Start the calls of one message and cancel what it says."""
        running = self._running[caller]
        for number, kind, contents in items:
            if kind == CALL:
                task = asyncio.create_task(self._run(caller, number, contents))
                running[number] = task
                task.add_done_callback(partial(self._call_ended, running, number))
            elif number in running:
                running[number].cancel()

    @property
    def running(self) -> int:
        """Number of calls that are not answered yet."""
        return sum(map(len, self._running.values()))

    async def close_calls(self, caller: str) -> None:
        """Cancel the calls of a caller that is dead. Waits until they have ended."""
        await cancel_and_wait(list(self._running.pop(caller, {}).values()))
        if (answers := self._answers.pop(caller, None)) is not None:
            answers.close()

    def _call_ended(
        self, running: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]
    ) -> None:
        """Forget a call; one that is cancelled before its first step runs no code itself."""
        running.pop(number, None)
        self._ended(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _answer(self, caller: str, send: Callable[[list[Item]], None], items: list[Item]) -> None:
        others = self.running - len(self._running.get(caller, {}))
        send([(others, LOAD, b""), *items])

    async def _run(self, caller: str, number: int, contents: bytes) -> None:
        current_caller.set(caller)
        current_call.set(number)
        now = asyncio.get_running_loop().time
        began = now()
        try:
            endpoint, args = pickle.loads(contents)
            found = pickle.dumps(await self._endpoint(endpoint)(*args))
            kind = RESULT
        except BaseException as error:
            if is_requested(error):
                raise
            found, kind = _packed(error), ERROR
        running = self._running.get(caller, {})
        running.pop(number, None)
        if (answers := self._answers.get(caller)) is not None:
            answers.took(now() - began, len(running))
            answers.add((number, kind, found))


def _packed(error: BaseException) -> bytes:
    """Pickle an error with its traceback; only the traceback where the error cannot travel.

    One that is no `Exception` would end its caller as if it had been cancelled or interrupted.
    """
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return pickle.dumps((None, text))
    try:
        packed = pickle.dumps((error, text))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  whatever a foreign exception raises when it is pickled
        return pickle.dumps((None, text))
    return packed


LENGTH = Struct("!Q")
OTHER = "other"


@dataclass(eq=False, repr=False)
class PipeCallFailed(RuntimeError):
    """An endpoint of the other process raised something that cannot be sent, or text of it."""

    endpoint: str
    text: str

    def __str__(self) -> str:
        return f"{self.endpoint} failed:\n{self.text.rstrip()}"


@dataclass(frozen=True)
class OpenCall:
    """A call that is not answered yet."""

    endpoint: str
    args: tuple[Any, ...] = field(repr=False)
    answer: asyncio.Future[Any] = field(repr=False)


class Caller(ABC):
    """Calls endpoints of another process by messages, on one event loop; subclasses send them."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, OpenCall] = {}
        self._lost: Callable[[int, OpenCall], Exception] | None = None

    @abstractmethod
    def post(self, item: Item) -> None:
        """Send a call, or its cancellation."""

    @abstractmethod
    def failure(self, endpoint: str, text: str) -> Exception:
        """Return the error for what an endpoint raised, by the text of its traceback."""

    @property
    def unanswered(self) -> Mapping[int, OpenCall]:
        """The calls of this end that are not answered yet, by their numbers."""
        return self._open

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint of the other process. Waits for its answer; raises its error.

        That error has one with its remote traceback as its cause.
        """
        number = next(self._numbers)
        one = OpenCall(endpoint, args, asyncio.get_running_loop().create_future())
        if self._lost is not None:
            raise self._lost(number, one)
        self._open[number] = one
        self.post((number, CALL, pickle.dumps((endpoint, args))))
        try:
            return await one.answer
        except asyncio.CancelledError:
            if not one.answer.done() or one.answer.cancelled():
                self.post((number, CANCEL, b""))
            raise
        finally:
            self._open.pop(number, None)

    def settle(self, item: Item) -> None:
        """Answer the call that an item of the other process belongs to, if it still waits."""
        number, kind, contents = item
        one = self._open.get(number)
        if one is None or one.answer.done():
            return
        try:
            found = pickle.loads(contents)
        except Exception as error:  # noqa: BLE001  an answer that cannot be rebuilt here
            kind, found = ERROR, (None, f"{type(error).__name__}: {error}")
        if kind == RESULT:
            one.answer.set_result(found)
            return
        raised, text = found
        remote = self.failure(one.endpoint, text)
        if raised is not None:
            raised.__cause__ = remote
        one.answer.set_exception(raised or remote)

    def end_calls(self, error_of: Callable[[int, OpenCall], Exception]) -> None:
        """End every call, and each later one, with the error for its number."""
        self._lost = error_of
        for number, one in self._open.items():
            if not one.answer.done():
                one.answer.set_exception(error_of(number, one))


class PipeCalls(Caller):
    """One end of the connection, from `open` to `close`, on one event loop.

    `endpoint` serves the other end's calls. `ended` is called once the other end is closed; calls
    that are open then wait until `end_calls` ends them.
    """

    def __init__(
        self,
        connection: socket.socket,
        endpoint: Callable[[str], Endpoint],
        ended: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._connection, self._ended = connection, ended
        self._server = CallServer(endpoint, failed)
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Start to read and to answer."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._server.answer_to(OTHER, self._send, 0.0)
        self._reading = asyncio.create_task(self._read(reader))

    def post(self, item: Item) -> None:
        self._send([item])

    def failure(self, endpoint: str, text: str) -> PipeCallFailed:
        return PipeCallFailed(endpoint, text)

    async def close(self) -> None:
        """Stop reading and close the connection; calls under way here are cancelled."""
        await self._server.close_calls(OTHER)
        if self._reading is not None:
            await cancel_and_wait([self._reading])
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):  # the other end is gone
                await self._writer.wait_closed()

    def _send(self, items: list[Item]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            data = pickle.dumps(items)
            self._writer.write(LENGTH.pack(len(data)) + data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._ended()

    def _take(self, items: list[Item]) -> None:
        self._server.take(OTHER, [one for one in items if one[1] in (CALL, CANCEL)])
        for item in items:
            if item[1] in (RESULT, ERROR):
                self.settle(item)
