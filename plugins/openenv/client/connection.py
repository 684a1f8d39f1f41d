"""One WebSocket to an OpenEnv server: one question, one answer, each within a limit.

A connection is never made again by itself: a new one would have an environment that was not reset.
After any failure it is closed, and says so. Frames are bounded before they are read, and
compression is off. Needs the extra `openenv`.

`open_and_ask` opens a session, and waits for a server that is full or comes back.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from composer_mesh.configs.validation import place_and_text
from composer_mesh.plugins.openenv.client.errors import (
    ConnectionLost,
    ProtocolViolation,
    ServerFailure,
    ServerFull,
    ServerTimeout,
    shown,
)
from composer_mesh.plugins.openenv.client.options import OpenEnvOptions
from composer_mesh.plugins.openenv.client.wire import (
    SERVER_FRAME,
    SESSION_PATH,
    ErrorCode,
    ErrorFrame,
    McpFrame,
    ResetFrame,
    ServerFrame,
    StateFrame,
    StepFrame,
)

Question = ResetFrame | StepFrame | StateFrame | McpFrame
BUSY = frozenset({429, 503})
UNREQUESTED = frozenset(
    {ErrorCode.CAPACITY_REACHED, ErrorCode.FACTORY_ERROR, ErrorCode.SESSION_ERROR}
)
"""Codes that a server sends by itself, before it closes the connection."""

CLOSE_S = 0.25
"""Seconds that a server is given to close its side; then the socket is cut."""


class _NoRedirect(connect):
    """Connects to the named address alone: a redirect would carry the token elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class OpenEnvConnection:
    """A connection with one question at a time; `open` it before the first."""

    def __init__(self, options: OpenEnvOptions, headers: dict[str, str]) -> None:
        self._options, self._headers = options, headers
        self._socket: ClientConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: ServerFailure | None = None

    async def open(self, limit_s: float) -> None:
        """Connect; raises ConnectionLost, ServerTimeout or ServerFull."""
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = await _NoRedirect(
                self._options.socket_url + SESSION_PATH,
                additional_headers=self._headers,
                compression=None,
                max_size=self._options.most_bytes,
                max_queue=1,
                open_timeout=min(limit_s, self._options.connect_s),
                ping_interval=self._options.ping_s,
                ping_timeout=self._options.ping_s,
                close_timeout=CLOSE_S,
                proxy=None if self._options.is_loopback else True,
            )
        except TimeoutError:
            raise self.fail(ServerTimeout, "did not connect in time: raise connect_s") from None
        except InvalidStatus as refused:
            raise self._refused(refused.response.status_code) from None
        except (OSError, WebSocketException, ValueError, EOFError) as error:
            reason = f"cannot be connected to ({type(error).__name__}: {shown(error)})"
            raise self.fail(ConnectionLost, reason) from None

    async def ask(self, question: Question, until: float, what: str) -> ServerFrame:
        """Send a frame and return its answer, which may be an error frame.

        Waits until the moment `until` of the loop's clock. Any failure closes the connection.
        """
        socket = self._usable()
        try:
            async with asyncio.timeout_at(until):
                return await self._answer_to(socket, question)
        except TimeoutError:
            raise self.fail(ServerTimeout, f"did not answer a {what} in time") from None
        except ConnectionClosed as closed:
            reason = f"closed the connection in a {what} ({shown(closed)})"
            raise self.fail(ConnectionLost, reason) from None
        except BaseException as error:
            if not isinstance(error, ServerFailure):
                self.fail(ConnectionLost, f"a {what} was interrupted")
            raise

    async def close(self) -> None:
        """Close the connection. Waits half a second at most for the server."""
        socket, self._socket = self._socket, None
        if socket is None or self._loop is None:
            return
        if self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(socket.transport.abort)
            return
        try:
            async with asyncio.timeout(2 * CLOSE_S):
                await socket.send('{"type":"close"}')
                await socket.close()
        except (TimeoutError, ConnectionClosed):
            pass  # it is closed in any case
        finally:
            socket.transport.abort()

    async def _answer_to(self, socket: ClientConnection, question: Question) -> ServerFrame:
        early = self._unread(socket)
        if early is not None:
            frame = self._parsed(early)
            if isinstance(frame, ErrorFrame) and frame.data.code in UNREQUESTED:
                return frame
            raise self.fail(ProtocolViolation, f"sent a {frame.type} frame that was not requested")
        with suppress(ConnectionClosed):  # what it said before it closed can still be read
            await socket.send(question.model_dump_json(exclude_none=True))
        return self._parsed(await socket.recv())

    def _unread(self, socket: ClientConnection) -> str | bytes | None:
        """Return a frame that has already arrived, without waiting; None if there is none.

        The coroutine is run to its first wait: a cancelled task would cost two turns of the loop.
        """
        receiving = socket.recv()
        try:
            receiving.send(None)
        except StopIteration as received:
            return cast("str | bytes", received.value)
        except ConnectionClosed:
            return None  # a closed connection is found where it is used
        receiving.close()
        return None

    def _parsed(self, frame: str | bytes) -> ServerFrame:
        if isinstance(frame, bytes):
            raise self.fail(ProtocolViolation, "sent a binary frame, but the protocol is JSON text")
        try:
            return SERVER_FRAME.validate_json(frame)
        except ValidationError as error:
            reason = f"sent a frame that cannot be read: {shown(place_and_text(error))}"
            raise self.fail(ProtocolViolation, reason) from None

    def _usable(self) -> ClientConnection:
        if self._failure is not None:
            raise self._failure
        if self._socket is None:
            raise self.fail(ConnectionLost, "the connection is closed")
        if self._loop is not asyncio.get_running_loop():
            raise self.fail(ConnectionLost, "the event loop of the connection was lost")
        return self._socket

    def _refused(self, status: int) -> ServerFailure:
        if status in BUSY:
            return self.fail(ServerFull, f"is busy (status {status})")
        where = (
            "" if status < 300 or status >= 400 else ": redirects are not followed, name the target"
        )
        return self.fail(ConnectionLost, f"opens no session (status {status}){where}")

    def fail(self, kind: type[ServerFailure], reason: str) -> ServerFailure:
        """Close the connection for good; return the error that every later use raises."""
        self._failure = kind(self._options.url, reason)
        if self._socket is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._socket.transport.abort)
            self._socket = None
        return self._failure


def reason_of(frame: ErrorFrame) -> str:
    """Return what an error frame says, in one bounded line."""
    details: list[Any] = [
        error.get("msg") for error in frame.data.errors if isinstance(error, dict)
    ]
    return shown(" ".join([frame.data.message, *map(str, details[:3])]))


T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0

Ask = Callable[[OpenEnvConnection], Awaitable[T]]


async def open_and_ask(
    options: OpenEnvOptions, headers: dict[str, str], limit_s: float, ask: Ask[T]
) -> tuple[OpenEnvConnection, T]:
    """Return a new connection and the result of its first questions.

    A server that is full, or cannot be connected to, is tried again for `limit_s` seconds, at
    growing intervals. One that fails after it was connected to is not.
    """
    loop = asyncio.get_running_loop()
    until, wait_s = loop.time() + limit_s, FIRST_WAIT_S
    turned_away: ServerFailure | None = None
    while True:
        connection = OpenEnvConnection(options, headers)
        opened = False
        try:
            await connection.open(max(until - loop.time(), 0.001))
            opened = True
            return connection, await ask(connection)
        except ServerTimeout as late:
            await connection.close()
            raise (late if opened else turned_away or late) from None
        except (ServerFull, ConnectionLost) as failure:
            turned_away = failure
            await connection.close()
            if (opened and not isinstance(failure, ServerFull)) or loop.time() + wait_s >= until:
                raise
        except BaseException:
            await connection.close()
            raise
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def full(url: str, frame: ErrorFrame) -> ServerFailure | None:
    """Return the error of a frame that says that the server has no free session."""
    if frame.data.code != ErrorCode.CAPACITY_REACHED:
        return None
    most = frame.data.max_sessions
    return ServerFull(
        url,
        f"had no free session in time, of {most if most is not None else 'an unknown number'} "
        f"({reason_of(frame)}): raise its max_concurrent_envs, or environment.call_s here",
    )
