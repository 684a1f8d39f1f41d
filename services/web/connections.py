"""Bounds of a server's connections: how many, and how long each may take.

A connection beyond the limit ends the one that is idle longest; where none is idle, it is answered
503 and closed. The last places are for the user who started the server: others, idle or not, cannot
lock the owner out. A request whose headers or body do not arrive in time is answered 408. A
connection without a request is closed; one whose peer takes nothing of an answer is aborted.

`OpenSocket` is the WebSocket protocol of uvicorn with these bounds, without what only its handshake
needs: a session is open for long and mostly waits, so what it holds is what bounds the number of
sessions. The parser of the handshake and the headers of the request are a sixth of that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from composer_mesh.mesh.json_server import BudgetSpent, ByteBudget, for_others, most_connections
from composer_mesh.mesh.tcp_peer import ROOT_USER, user_at
from composer_mesh.services.web.errors import BAD_REQUEST, UNAVAILABLE

HEAD_S, BODY_S, SENDING_S, LINGER_S = 20.0, 60.0, 60.0, 2.0
MOST = 16_384
LATE = 408
WARNINGS, WARNINGS_S = 20, 60.0
"""Warnings about malformed requests that are logged, and in how many seconds."""
MOST_HEAD = 64 * 1024
FREE_CHUNKS, MEAN_CHUNK = 1000, 64
"""Chunks of a body that may have any size, and the least mean size of more: each takes 10 us."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server process. `head_s` and `body_s` bound the arrival of one request.

    `sending_s` is how long a peer may take nothing of what is sent to it.
    """

    most: int = field(default_factory=lambda: most_connections(MOST))
    head_s: float = HEAD_S
    body_s: float = BODY_S
    sending_s: float = SENDING_S

    @property
    def for_others(self) -> int:
        """Connections that other users may hold; the rest is the owner's."""
        return for_others(self.most)


class SparseWarnings(logging.Filter):
    """Lets few warnings a minute into a log, then says how many were left out: clients cause them.

    Errors, which are faults of ours, all pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._until, self._count = clock, -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if (now := self._clock()) >= self._until:
            if (left_out := self._count - WARNINGS) > 0:
                text = f"{record.getMessage()} ({left_out} warnings before were left out)"
                record.msg, record.args = text, ()
            self._until, self._count = now + WARNINGS_S, 0
        self._count += 1
        return self._count <= WARNINGS


logging.getLogger("uvicorn.error").addFilter(SparseWarnings())

UserAt = Callable[[Any, Any, int], int | None]


class Connections:
    """The open connections of one server process, within its limits."""

    def __init__(self, limits: ServerLimits, user: UserAt = user_at) -> None:
        self.limits, self._user = limits, user
        self._open: set[asyncio.BaseTransport] = set()
        self._idle: dict[HttpConnection, None] = {}
        """Those without a request, oldest first."""

    def take(self, connection: HttpConnection) -> bool:
        """Count a connection; return False where no place is free and none is idle."""
        count = len(self._open)
        if count >= self.limits.for_others:
            owners = connection.is_owners = self._is_owners(connection.transport)
            full = count >= (self.limits.most if owners else self.limits.for_others)
            if full and not self._end_idle(owners):
                return False
        self._open.add(connection.transport)
        return True

    def _end_idle(self, even_owners: bool) -> bool:
        """End the connection that is idle longest; return False where none is."""
        oldest = next((one for one in self._idle if even_owners or not one.is_owners), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        self.release(oldest.transport)
        oldest.close()
        return True

    def release(self, transport: asyncio.BaseTransport) -> None:
        """Stop counting a connection."""
        self._open.discard(transport)

    def idle(self, connection: HttpConnection, is_idle: bool) -> None:
        """Note whether a connection waits for a request."""
        if is_idle:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)

    def _is_owners(self, transport: asyncio.Transport) -> bool:
        there, here = get_remote_addr(transport), get_local_addr(transport)
        if there is None or here is None:
            return True  # a Unix socket in a folder that only this user can open
        family = socket.AF_INET6 if ":" in there[0] else socket.AF_INET
        try:
            return self._user(there, here, family) in (os.geteuid(), ROOT_USER)
        except OSError:
            return False


class ServerConfig(uvicorn.Config):
    """Settings of uvicorn, and what the connections of one server share."""

    connections: Connections
    messages: ByteBudget


class EndsStalled(asyncio.Protocol):
    """A part of protocols: aborts a connection whose peer takes nothing of what is sent."""

    config: Any
    loop: Any
    transport: Any
    _sending: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_sending(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sent()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._sent()
        self.config.connections.release(self.transport)

    def _check_sending(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
            return
        wait_s = self.config.connections.limits.sending_s
        self._sending = self.loop.call_later(wait_s, self._check_sending, left)

    def _sent(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


class BoundedChunks(h11.Connection):
    """Reads no further in a body of too many small chunks, which would take all time of a core."""

    too_small = False
    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = h11.NEED_DATA if self.too_small else super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            self.too_small = self._chunks > FREE_CHUNKS + self._bytes // MEAN_CHUNK
        return event


class HttpConnection(EndsStalled, H11Protocol):
    """A connection with a place of its server, whose requests have to arrive in time."""

    _arriving: asyncio.TimerHandle | None = None
    _closing: asyncio.TimerHandle | None = None
    _watched: object = None
    _upgraded = False
    is_owners = False
    """Known to be of the user who started the server; looked up only where places are few."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.conn: BoundedChunks = BoundedChunks(h11.SERVER, MOST_HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connections = self.config.connections
        if connections.take(self):
            self._watch()
        else:
            most = connections.limits.most
            self._answer(UNAVAILABLE, f"all {most} connections are taken: close some, or come back")
            self.close()

    def data_received(self, data: bytes) -> None:
        if self._closing is not None:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._watch()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._upgraded = True
        self._watch()
        if self._closing is not None:
            self._closing.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.close()

    def _watch(self) -> None:
        """Bound what the peer has to send next: nothing, the head or the body of a request."""
        if self.conn.too_small and self._closing is None:
            mean = f"{MEAN_CHUNK} bytes each, or a content-length"
            self._refuse(BAD_REQUEST, f"the body has too many small chunks: send {mean}")
        theirs, limits = self.conn.their_state, self.config.connections.limits
        wait_s = {h11.IDLE: limits.head_s, h11.SEND_BODY: limits.body_s}.get(theirs)
        watched = None if wait_s is None or self._upgraded else (theirs, self.cycle)
        if watched == self._watched:
            return
        self._watched = watched
        self.config.connections.idle(self, watched is not None and theirs is h11.IDLE)
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        if watched is not None and wait_s is not None:
            self._arriving = self.loop.call_later(wait_s, self._late, wait_s)

    def _late(self, wait_s: float) -> None:
        if self._closing is not None:
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.close()
            return
        part = "headers" if self.conn.their_state is h11.IDLE else "body"
        self._refuse(LATE, f"the {part} did not arrive in {wait_s:g} s: send faster")

    def _refuse(self, status: int, text: str) -> None:
        """End a request that is not read further, with an answer where none was begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        self._answer(status, text)
        self._leave()
        self.transport.write_eof()  # closed at once, it could be reset before the peer has read
        self._closing = self.loop.call_later(LINGER_S, self.transport.abort)

    def _answer(self, status: int, text: str) -> None:
        """Answer in place of the application."""
        content = json.dumps({"detail": text}).encode()
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode()
            + content
        )

    def _leave(self) -> None:
        """Let the application find the connection closed."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def close(self) -> None:
        """Close the connection; after `sending_s` what its peer has not taken is dropped."""
        self._leave()
        self.transport.close()
        if self._closing is None:
            wait_s = self.config.connections.limits.sending_s
            self._closing = self.loop.call_later(wait_s, self.transport.abort)


TRY_AGAIN_LATER, LONGEST_REASON = 1013, 120
"""Of RFC 6455: a status, and the bytes of a reason."""


class _Ended:
    """The handshake of a connection that is open: nothing comes from it any more."""

    def events(self) -> Iterator[Any]:
        return iter(())


_ENDED: Any = _Ended()


class OpenSocket(EndsStalled, WSProtocol):
    """Releases the handshake when a connection has been accepted.

    A message counts among those of its address until the application receives the next.
    """

    _held = _received = 0

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept" and self.handshake_complete:
            self.conn.handshake = _ENDED
            self.scope["headers"] = []

    async def receive(self) -> Any:
        self._hold(-min(self._received, self._held))
        message: Any = await super().receive()
        self._received = len(message.get("text") or message.get("bytes") or "")
        return message

    def handle_message(self, event: TextMessage | BytesMessage) -> None:
        try:
            self._hold(len(event.data))
        except BudgetSpent as spent:
            self._refuse(str(spent))
        else:
            super().handle_message(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hold(-self._held)

    def _hold(self, count: int) -> None:
        address = "" if self.client is None else self.client[0]
        self.config.messages.change(address, count)
        self._held += count

    def _refuse(self, reason: str) -> None:
        self.close_sent = True
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": reason}
        )
        closing = CloseConnection(code=TRY_AGAIN_LATER, reason=reason[:LONGEST_REASON])
        self.transport.write(self.conn.send(closing))
        self.transport.close()
