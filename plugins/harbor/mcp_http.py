"""MCP servers by URL: streamable HTTP, and the older transport of one long stream of events.

    this process -- a socket of the container's network --> service, or program in the container

Each request has a connection of its own. What is read of an answer is bounded in bytes, and its
time is the agent's. Redirects are not followed, and no cookie is kept.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

import h11

from composer_mesh.plugins.harbor.box_ports import CHUNK
from composer_mesh.plugins.harbor.machine import SETUP_S, Machine
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.sandbox import MIB

MOST_ANSWER = MIB
"""Bytes that are read for one request, heads and framing included."""
MOST_HEAD = 64 * 1024
LOOK_S = 0.2
"""Between two attempts to connect to a server that does not listen yet."""
EVENTS = "text/event-stream"
SESSION_HEADER, VERSION_HEADER = "mcp-session-id", "mcp-protocol-version"
VERSION = "2025-06-18"
"""Version of the protocol that is offered; a server may answer with another one."""
PORTS: Mapping[str, int] = {"http": 80, "https": 443}


class Answer:
    """The answer to a request, read as it comes; each `piece` and `event` waits for more of it."""

    def __init__(self, reader: asyncio.StreamReader, client: h11.Connection) -> None:
        self._reader, self._client = reader, client
        self._line, self._data = bytearray(), list[str]()
        self._name = "message"
        self._events: deque[tuple[str, str]] = deque()
        self._ended = False
        self.left = MOST_ANSWER
        """Bytes that may still be read."""

    async def head(self) -> h11.Response:
        """Read the status and the headers."""
        while not isinstance(found := await self._next(), h11.Response):
            pass  # a status below 200, which others follow
        return found

    async def piece(self) -> bytes:
        """Return the next bytes of the body; empty at its end."""
        while not self._ended:
            found = await self._next()
            if isinstance(found, h11.Data):
                return bytes(found.data)
            self._ended = True
        return b""

    async def whole(self) -> bytes:
        """Return the body."""
        parts = []
        while piece := await self.piece():
            parts.append(piece)
        return b"".join(parts)

    async def event(self) -> tuple[str, str]:
        """Return the next event: its name and its data. Raises ToolError at the end."""
        while not self._events:
            piece = await self.piece()
            if not piece:
                raise ToolError("mcp_error", "the server ended its events without an answer")
            first, *rest = piece.split(b"\n")
            self._line += first
            for one in rest:
                self._take(self._line.decode("utf-8", "replace").removesuffix("\r"))
                self._line = bytearray(one)
        return self._events.popleft()

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif not line:
            if self._data:
                self._events.append((self._name, "\n".join(self._data)))
            self._name, self._data = "message", []

    async def _next(self) -> Any:
        while (found := self._client.next_event()) is h11.NEED_DATA:
            content = await self._reader.read(CHUNK)
            self.left -= len(content)
            if self.left < 0:
                raise ToolError("mcp_error", f"the answer has more than {MOST_ANSWER:,} bytes")
            self._client.receive_data(content)
        return found

    async def answer_to(self, wanted: object) -> Any:
        """Return the message of an event that answers a request; others are passed over."""
        while True:
            _, data = await self.event()
            found = json.loads(data)
            if isinstance(found, dict) and found.get("id") == wanted:
                return found


class HttpServer:
    """A server over streamable HTTP: each message is a POST, whose answer is JSON or events."""

    def __init__(self, machine: Machine, server: McpServerTable) -> None:
        self._machine, self._server = machine, server
        self._session: dict[str, str] = {}
        self._url = str(server.url)

    async def open(self) -> None:
        """Wait until something listens at the URL; raise TaskFailure where nothing does."""
        self._session = {}
        try:
            async with asyncio.timeout(SETUP_S):
                await self._connectable()
        except OSError as error:  # a name that is not found, or too late
            said = str(error) or f"nothing listens there after {SETUP_S:g} s"
            raise TaskFailure("mcp_server", f"{self._server.name!r}: {self._url}: {said}") from None

    async def close(self) -> None:
        """Do nothing: no connection outlives its request."""

    async def exchange(self, message: Mapping[str, Any], seconds: float) -> Any:
        """Send a message by a POST of its own."""
        async with (
            self._machine.timed(seconds),
            self._requested("POST", self._url, json.dumps(message).encode()) as (answer, head),
        ):
            headers = _headers_of(head)
            if "id" not in message:
                return None
            if message["method"] == "initialize" and SESSION_HEADER in headers:
                self._session[SESSION_HEADER] = headers[SESSION_HEADER]
            if headers.get("content-type", "").startswith(EVENTS):
                found = await answer.answer_to(message["id"])
            else:
                found = json.loads(await answer.whole())
            if message["method"] == "initialize":
                self._session[VERSION_HEADER] = _version_of(found)
            return found

    @asynccontextmanager
    async def _requested(
        self, method: str, url: str, content: bytes = b""
    ) -> AsyncIterator[tuple[Answer, h11.Response]]:
        """Send a request; yield its answer, which is no error. The connection ends with it."""
        client = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)
        split = urlsplit(url)
        headers = {
            "Host": split.netloc,
            "Accept": f"application/json, {EVENTS}",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **self._session,
            **self._server.headers,
        }
        target = (split.path or "/") + (f"?{split.query}" if split.query else "")
        try:
            reader, writer = await self._connected()
            try:
                request = h11.Request(method=method, target=target, headers=list(headers.items()))
                for event in (request, h11.Data(content), h11.EndOfMessage()):
                    writer.write(client.send(event) or b"")
                await writer.drain()
                answer = Answer(reader, client)
                head = await answer.head()
                if not 200 <= head.status_code < 300:
                    said = (await answer.whole()).decode(errors="replace").strip()[:300]
                    raise ToolError("mcp_error", f"status {head.status_code}: {said}")
                yield answer, head
            finally:
                writer.transport.abort()
        except TimeoutError:
            raise
        except (OSError, h11.ProtocolError) as error:
            raise ToolError("mcp_error", f"the server gave no answer: {error}") from None

    async def _connectable(self) -> None:
        while True:
            try:
                _, writer = await self._connected()
            except ConnectionRefusedError:
                await self._machine.services.refuse_ended()
                await asyncio.sleep(LOOK_S)
            else:
                return writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server's host: in the container's network if it is one of it."""
        split = urlsplit(self._url)
        port, host = split.port or PORTS[split.scheme], self._server.host
        tls = ssl.create_default_context() if split.scheme == "https" else None
        if self._server.is_inside or host in self._machine.settings.names:
            sock = await self._machine.container.connect(port)
            name = host if tls is not None else None
            return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=name)
        return await asyncio.open_connection(host, port, ssl=tls)


class EventStream(HttpServer):
    """A server of the older transport: answers are events of one GET, which names where to POST."""

    def __init__(self, machine: Machine, server: McpServerTable) -> None:
        super().__init__(machine, server)
        self._opened = AsyncExitStack()
        self._answer: Answer | None = None
        self._post = ""
        self._busy = asyncio.Lock()

    async def open(self) -> None:
        """Open the stream, and read where messages are posted to."""
        await super().open()
        async with self._machine.timed(SETUP_S):
            requested = self._requested("GET", self._url)
            answer, head = await self._opened.enter_async_context(requested)
            if not _headers_of(head).get("content-type", "").startswith(EVENTS):
                raise ToolError("mcp_error", f"the URL answers with no {EVENTS}")
            name, path = await answer.event()
        self._post = urljoin(self._url, path)
        here, there = (urlsplit(one)[:2] for one in (self._url, self._post))
        if name != "endpoint" or here != there:
            raise ToolError("mcp_error", f"its first event is {name[:40]!r}: {path[:200]!r}")
        self._answer = answer

    async def close(self) -> None:
        """Close the stream."""
        await self._opened.aclose()
        self._answer = None

    async def exchange(self, message: Mapping[str, Any], seconds: float) -> Any:
        """Post a message, and read the events of the stream until its answer."""
        async with self._machine.timed(seconds), self._busy:
            answer = self._answer
            if answer is None:
                raise ToolError("mcp_error", "the stream of events is not open")
            answer.left = MOST_ANSWER
            async with self._requested("POST", self._post, json.dumps(message).encode()):
                pass
            return await answer.answer_to(message["id"]) if "id" in message else None


def _headers_of(head: h11.Response) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in head.headers}


def _version_of(answer: Any) -> str:
    """Return the version of the protocol that a server has chosen, for a header."""
    result = answer.get("result") if isinstance(answer, dict) else None
    version = result.get("protocolVersion") if isinstance(result, dict) else None
    return version if isinstance(version, str) and version.isascii() else VERSION
