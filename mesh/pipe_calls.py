"""Calls between a process and one that it has started, both ways, over a pair of sockets.

    PipeCalls <-- calls, cancellations, answers --> PipeCalls of the other process

Messages are pickled: both processes are ours and of the same installation. Imports nothing of
Monarch, so that the started process is ready soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from struct import Struct
from typing import Any

from composer_mesh.mesh.call_server import CALL, CANCEL, LOAD, RESULT, CallServer, Endpoint, Item
from composer_mesh.mesh.waiting import cancel_and_wait

LENGTH = Struct("!Q")
OTHER = "other"


class PipeCallFailed(RuntimeError):
    """An endpoint of the other process raised something that cannot be sent, or text of it."""

    def __init__(self, endpoint: str, text: str) -> None:
        super().__init__(endpoint, text)
        self.endpoint, self.text = endpoint, text

    def __str__(self) -> str:
        return f"{self.endpoint} failed:\n{self.text.rstrip()}"


@dataclass(frozen=True)
class OpenCall:
    """A call that is not answered yet."""

    endpoint: str
    args: tuple[Any, ...] = field(repr=False)
    answer: asyncio.Future[Any] = field(repr=False)


class PipeCalls:
    """One end of the connection, from `open` to `close`, on one event loop.

    `endpoint` serves the other end's calls. `ended` is called once the other end is closed; calls
    that are open then wait until `lose` ends them.
    """

    def __init__(
        self,
        connection: socket.socket,
        endpoint: Callable[[str], Endpoint],
        ended: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._connection, self._ended = connection, ended
        self._server, self._numbers = CallServer(endpoint, failed), count()
        self._open: dict[int, OpenCall] = {}
        self._lost: Callable[[int, OpenCall], Exception] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Start to read and to answer."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._server.answer_to(OTHER, self._send, 0.0)
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def unanswered(self) -> Mapping[int, OpenCall]:
        """The calls of this end that are not answered yet, by their numbers."""
        return self._open

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint of the other process. Waits for its answer; raises its error."""
        number = next(self._numbers)
        one = OpenCall(endpoint, args, asyncio.get_running_loop().create_future())
        if self._lost is not None:
            raise self._lost(number, one)
        self._open[number] = one
        self._send([(number, CALL, pickle.dumps((endpoint, args)))])
        try:
            return await one.answer
        except asyncio.CancelledError:
            if not one.answer.done() or one.answer.cancelled():
                self._send([(number, CANCEL, b"")])
            raise
        finally:
            self._open.pop(number, None)

    def lose(self, error_of: Callable[[int, OpenCall], Exception]) -> None:
        """End every call, and each later one, with the error for its number."""
        self._lost = error_of
        for number, one in self._open.items():
            if not one.answer.done():
                one.answer.set_exception(error_of(number, one))

    async def close(self) -> None:
        """Stop reading and close the connection; calls under way here are cancelled."""
        await self._server.hang_up(OTHER)
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
        for number, kind, contents in _answers(items):
            one = self._open.get(number)
            if one is not None and not one.answer.done():
                _settle(one, kind, contents)


def _answers(items: list[Item]) -> Iterator[Item]:
    return (one for one in items if one[1] not in (CALL, CANCEL, LOAD))


def _settle(one: OpenCall, kind: str, contents: bytes) -> None:
    try:
        found = pickle.loads(contents)
    except Exception as error:  # noqa: BLE001  an answer that cannot be rebuilt here
        text = f"{type(error).__name__}: {error}"
        one.answer.set_exception(PipeCallFailed(one.endpoint, text))
        return
    if kind == RESULT:
        one.answer.set_result(found)
        return
    raised, text = found
    remote = PipeCallFailed(one.endpoint, text)
    if raised is not None:
        raised.__cause__ = remote
    one.answer.set_exception(raised or remote)
