"""MCP servers by URL that answer in any way: a result, an error in words, and bounds that hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_containers import FakeContainers
from harbor_folders import TOML, written

from composer_mesh.plugins.harbor import mcp_http
from composer_mesh.plugins.harbor.box_ports import served
from composer_mesh.plugins.harbor.machine import Limits, Machine
from composer_mesh.plugins.harbor.mcp_servers import TaskMcpServers
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.plugins.harbor.task_folder import read_folders
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import ToolError

JSON, EVENTS = "application/json", "text/event-stream"
TOOLS = {"tools": [{"name": "echo", "inputSchema": {}}]}


def replied(body: bytes, kind: str = JSON, status: str = "200 OK", more: str = "") -> bytes:
    """Return a whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}\r\n".encode() + body


class Server:
    """Answers by functions of the message; keeps the heads of requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.call: Callable[[dict[str, Any]], bytes] = self.right
        self.tools: dict[str, Any] = TOOLS
        self.stays_open = False
        self.stream = asyncio.Queue[bytes]()

    def result(self, message: dict[str, Any]) -> bytes:
        """Return the answer to a message."""
        methods = {"initialize": {"protocolVersion": "2025-03-26"}, "tools/list": self.tools}
        text = json.dumps(message.get("params", {}).get("arguments"))
        result = methods.get(message["method"], {"content": [{"type": "text", "text": text}]})
        return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()

    def right(self, message: dict[str, Any]) -> bytes:
        """Return what is sent for the answer to a message."""
        return replied(self.result(message))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        message = json.loads(await reader.readexactly(length))
        if "id" not in message:
            writer.write(replied(b"", status="202 Accepted"))
        elif message["method"] == "tools/call":
            writer.write(self.call(message))
        else:
            writer.write(replied(self.result(message), more="Mcp-Session-Id: s1\r\n"))
        if self.stays_open:
            await asyncio.Event().wait()
        writer.close()


class Events(Server):
    """The older transport: answers are events of the stream that a GET has opened."""

    first = b"event: endpoint\ndata: /post?s=1\n\n"

    def right(self, message: dict[str, Any]) -> bytes:
        return b"data: " + self.result(message) + b"\n\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        if head.startswith("get"):
            begin = f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}\r\nConnection: close\r\n\r\n"
            writer.write(begin.encode() + self.first)
            stream = self.stream = asyncio.Queue()
            while piece := await stream.get():
                writer.write(piece)
            return writer.close()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        message = json.loads(await reader.readexactly(length))
        if "id" in message:
            called = message["method"] == "tools/call"
            self.stream.put_nowait(self.call(message) if called else self.right(message))
        writer.write(replied(b"", status="202 Accepted"))
        return writer.close()


@asynccontextmanager
async def opened(
    folder: Path, server: Server, transport: str = "http", **table: Any
) -> AsyncIterator[TaskMcpServers]:
    """Serve; yield the servers of a machine, which are not started yet."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://localhost:{listening.getsockname()[1]}/mcp?a=1"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):  # a client that only tries to connect
            await server.serve(reader, writer)

    (task,) = read_folders(written(folder / "task", {"task.toml": TOML}))
    machine = Machine(FakeContainers(), task, Limits())  # type: ignore[arg-type]
    await machine.start()
    named = McpServerTable(**{"name": "one", "transport": transport, "url": url, **table})
    servers = TaskMcpServers(machine, [named])
    async with served(listening, serve):
        try:
            yield servers
        finally:
            await servers.close()
            await machine.close()


@pytest.mark.parametrize(("kind", "transport"), [(Server, "http"), (Events, "sse")])
async def test_a_tool_is_called_with_the_headers_of_the_task(
    tmp_path: Path, kind: type[Server], transport: str
) -> None:
    server = kind()
    async with opened(tmp_path, server, transport, headers={"X-Team": "red"}) as servers:
        await servers.start()
        assert await servers.call("one", "echo", {"a": "b"}, 60) == '{"a": "b"}'
        with pytest.raises(ToolError, match="no server 'two' has a tool"):
            await servers.call("two", "echo", {}, 60)
        assert "server one" in servers.described()
        await servers.start()  # the next step of a task
        assert await servers.call("one", "echo", {"a": 2}, 60) == '{"a": 2}'
    assert all("x-team: red" in head and "host: localhost:" in head for head in server.heads)
    if transport == "http":
        assert "mcp-session-id" not in server.heads[0]
        assert "mcp-session-id: s1" in server.heads[1]
        assert "mcp-protocol-version: 2025-03-26" in server.heads[3]
        assert server.heads[0].startswith("post /mcp?a=1 ")


def events(*texts: bytes) -> bytes:
    """Return an answer of events without a length."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}; charset=utf-8\r\nConnection: close\r\n\r\n"
    return head.encode() + b"".join(texts)


async def test_events_before_the_answer_are_passed_over(tmp_path: Path) -> None:
    server = Server()
    noise = b': ping\r\n\r\nid: 3\r\ndata: {"method": "notifications/x"}\r\n\r\nretry: 1\n\n'
    other = b'event: message\ndata: {"id": "other", "result": {}}\n\n'

    def call(message: dict[str, Any]) -> bytes:
        first, second = server.result(message).split(b", ", 1)
        return events(noise, other, b"data:" + first + b",\ndata: " + second + b"\n\n")

    server.call, server.stays_open = call, True
    async with opened(tmp_path, server) as servers:
        await servers.start()
        assert await servers.call("one", "echo", {"a": 1}, 60) == '{"a": 1}'


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "gave no answer"),
    "no HTTP": (b"hello\r\n\r\n", "gave no answer"),
    "status": (replied(b"who are you", status="403 Forbidden"), "status 403: who are you"),
    "redirect": (replied(b"", status="307 x", more="Location: http://b/\r\n"), "status 307"),
    "no JSON": (replied(b"hello"), "gave no answer to tools/call"),
    "deep": (replied(b"[" * 100_000), "gave no answer to tools/call"),
    "list": (replied(b"[]"), "an answer without a result"),
    "error": (replied(b'{"id": 1, "error": {"message": "no"}}'), "tools/call: no"),
    "cut": (replied(b"{}").replace(b"Length: 2", b"Length: 9"), "gave no answer"),
    "long": (replied(b" " * (2 << 20)), "more than 1,048,576 bytes"),
    "long line": (events(b"data: " + b"a" * (2 << 20)), "more than 1,048,576 bytes"),
    "many events": (events(b"data: {}\n\n" * 200_000), "more than 1,048,576 bytes"),
    "events end": (events(b"data: {}\n\n"), "ended its events without an answer"),
    "event no JSON": (events(b"data: {\n\n"), "gave no answer to tools/call"),
    "long head": (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 200_000, "gave no answer"),
}


@pytest.mark.parametrize("case", list(WRONG))
async def test_whatever_is_no_answer_is_an_error_of_the_call(tmp_path: Path, case: str) -> None:
    server = Server()
    content, said = WRONG[case]
    server.call = lambda _: content
    async with opened(tmp_path, server) as servers:
        await servers.start()
        with pytest.raises(ToolError, match=said) as failed:
            await servers.call("one", "echo", {}, 60)
        assert (failed.value.kind, failed.value.facts) == ("mcp_error", {"tool": "echo"})
        server.call = server.right
        assert await servers.call("one", "echo", {"a": 1}, 60) == '{"a": 1}'


@pytest.mark.parametrize(("kind", "transport"), [(Server, "http"), (Events, "sse")])
async def test_an_answer_that_does_not_come_in_time_is_one_error(
    tmp_path: Path, kind: type[Server], transport: str
) -> None:
    server = kind()
    async with opened(tmp_path, server, transport) as servers:
        await servers.start()
        server.stays_open = True
        server.call = lambda _: b": wait\n\n" if transport == "sse" else b"HTTP/1.1 "
        with pytest.raises(ToolError, match="tools/call took too long") as failed:
            await servers.call("one", "echo", {}, 0.3)
        assert failed.value.kind == "mcp_timeout"
        server.call, server.stays_open = server.right, False
        assert await servers.call("one", "echo", {"a": 1}, 60) == '{"a": 1}'


async def test_seconds_of_a_call_are_the_agents(tmp_path: Path) -> None:
    server = Server()
    async with opened(tmp_path, server) as servers:
        await servers.start()
        machine = servers._servers["one"]._machine  # type: ignore[attr-defined]
        before = machine.remaining_s
        await servers.call("one", "echo", {}, 60)
        assert machine.remaining_s < before


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"event: endpoint\ndata: http://evil.org/post\n\n", "its first event is 'endpoint'"),
        (b"event: endpoint\ndata: //evil.org:1/post\n\n", "its first event is 'endpoint'"),
        (b"data: /post\n\n", "its first event is 'message'"),
    ],
)
async def test_messages_are_posted_to_the_host_of_the_stream_alone(
    tmp_path: Path, first: bytes, said: str
) -> None:
    server = Events()
    server.first = first
    async with opened(tmp_path, server, "sse") as servers:
        with pytest.raises(TaskFailure, match=said) as failed:
            await servers.start()
        assert failed.value.kind == "mcp_server"


async def test_a_stream_that_ends_is_an_error_of_each_call(tmp_path: Path) -> None:
    server = Events()
    async with opened(tmp_path, server, "sse") as servers:
        await servers.start()
        server.call = lambda _: b""
        for _ in range(2):
            with pytest.raises(ToolError, match="ended its events without an answer"):
                await servers.call("one", "echo", {}, 60)


async def test_a_server_that_never_listens_is_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_http, "SETUP_S", 0.5)
    server = Server()
    async with opened(tmp_path, server, url="http://127.0.0.1:1/mcp") as servers:
        with pytest.raises(TaskFailure, match="nothing listens there") as failed:
            await servers.start()
        assert failed.value.kind == "mcp_server"
