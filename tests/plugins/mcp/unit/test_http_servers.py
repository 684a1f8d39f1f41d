"""Calls of an MCP server over streamable HTTP, in a process of its own that the tests end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kept_port import kept_port

from composer_mesh.configs.environment import McpServer
from composer_mesh.mesh.task_resources import attach_servers, with_tools
from composer_mesh.plugins.mcp.connection import (
    LONGEST_ANSWER,
    HttpAnswers,
    HttpRefused,
)
from composer_mesh.plugins.mcp.servers import ServerConnections
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import ToolError, ToolServerLost, UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.running import RunningEpisode

FILE = Path(__file__).parents[1] / "helpers" / "mcp_example_server.py"
JSON = {"content-type": "application/json"}
Start = Callable[..., "HttpServer"]


class HttpServer:
    """The example server over HTTP."""

    def __init__(self, mode: str, port: int = 0) -> None:
        command = [sys.executable, str(FILE), "--http", str(port), mode]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def table(self, **keys: Any) -> McpServer:
        given = {"start_s": 60.0, "sessions": "own", **keys}
        return McpServer(name="far", transport="http", url=self.url, **given)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def started() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(mode: str = "sessions", port: int = 0) -> HttpServer:
            server = HttpServer(mode, port)
            stack.callback(server.end)
            return server

        yield start


@asynccontextmanager
async def opened(table: McpServer) -> AsyncIterator[ServerConnections]:
    connections = ServerConnections(table, {})
    try:
        yield connections
    finally:
        await connections.close()


async def test_each_episode_has_a_session_of_its_own_that_a_failed_tool_does_not_end(
    started: Start,
) -> None:
    async with opened(started().table()) as connections:
        calls = [await connections.call(key, "count_in_session", {}) for key in "aba"]
        with pytest.raises(ToolError) as failed:
            await connections.call("a", "fail", {"why": "no"})
        calls.append(await connections.call("a", "count_in_session", {}))
        connections.end("a")
        calls.append(await connections.call("a", "count_in_session", {}))
    counts, sessions = zip(*(one.split(" in ") for one in calls), strict=True)
    assert counts == ("1", "1", "2", "3", "1")
    assert sessions[0] == sessions[2] == sessions[3]
    assert len(set(sessions)) == 3
    assert failed.value.kind == "mcp_tool_error"


async def test_a_session_is_never_continued_on_a_server_that_was_started_again(
    started: Start,
) -> None:
    server = started()
    async with opened(server.table()) as connections:
        assert (await connections.call("a", "count", {})).startswith("1 ")
        server.end()
        with kept_port(server.port):
            started(port=server.port)
        for _ in range(2):
            with pytest.raises(ToolServerLost) as lost:
                await connections.call("a", "count", {})
            assert lost.value.failure_class == "infrastructure"
        assert (await connections.call("b", "count", {})).startswith("1 ")


async def test_a_server_that_dies_under_a_call_is_infrastructure_until_it_is_back(
    started: Start,
) -> None:
    server = started()
    async with opened(server.table(sessions="shared")) as connections:
        assert await connections.call("a", "add", {"a": 1, "b": 2}) == "3"
        with pytest.raises(ToolServerLost, match="lost under a call"):
            await connections.call("a", "die", {})
        with kept_port(server.port):
            with pytest.raises(ToolServerLost, match="cannot be reached"):
                await connections.call("a", "add", {"a": 1, "b": 2})
            started(port=server.port)
        assert await connections.call("a", "add", {"a": 1, "b": 2}) == "3"


async def test_a_server_without_sessions_keeps_no_state_apart_and_is_refused_for_that(
    started: Start,
) -> None:
    server = started("stateless")
    async with opened(server.table()) as connections:
        with pytest.raises(UnusableTask, match='set sessions = "shared"'):
            await connections.tools()
    async with opened(server.table(sessions="shared")) as connections:
        assert await connections.call("a", "add", {"a": 1, "b": 2}) == "3"


async def test_a_failed_tool_is_an_observation_and_an_error_site_of_the_episode(
    started: Start, build_config: Any
) -> None:
    table = started().table(allow=("add", "fail")).model_dump(exclude={"tools"}, exclude_none=True)
    config = with_tools_in_thread(
        build_config(environment={"max_turns": 6, "call_s": 100.0, "mcp": [table]})
    )
    task = make_task(config)
    servers = attach_servers(config, task, {})
    assert servers is not None
    try:
        episode = RunningEpisode(task, task.episode("train", 0))
        await episode.begin()
        step = await episode.step(call_text("fail", {"why": "no"}))
        assert step.error is not None
        assert step.error.error_kind == "mcp_tool_error"
        assert "fail" in str(step.messages[0]["content"])
        assert not step.done
        again = await episode.step(call_text("add", {"a": 1, "b": 2}))
        assert (again.messages[0]["content"], again.error) == ("3", None)
        await episode.close()
    finally:
        await servers.close()


def with_tools_in_thread(config: Any) -> Any:
    """Ask the servers as a command does, which has no event loop yet."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_tools, config, {}).result()


async def answered(answers: HttpAnswers, answer: httpx2.Response, method: str = "POST") -> None:
    async with httpx2.AsyncClient(
        transport=httpx2.MockTransport(lambda request: answer),
        event_hooks={"response": [answers.read]},
    ) as client:
        await client.request(method, "http://far.example/mcp")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, b"", "refuses the token"),
        (404, b"", "no longer knows the session"),
        (429, b"", "too many requests"),
        (500, b'{"error": {"code": -32602}}', "status 500"),
        (503, b"", "status 503"),
        (400, b"", "status 400"),
        (400, b"[" * 100_000, "status 400"),
        (400, b'{"error": {"code": -32000, "message": "no session"}}', "status 400"),
    ],
)
async def test_a_refusal_that_is_not_about_the_arguments_ends_the_connection(
    status: int, body: bytes, reason: str
) -> None:
    answers = HttpAnswers()
    answers.is_open = True
    with pytest.raises(HttpRefused, match=reason):
        await answered(answers, httpx2.Response(status, headers=JSON, content=body))
    assert reason in str(answers.problem)


async def test_refused_arguments_and_what_is_tried_while_connecting_end_nothing() -> None:
    answers = HttpAnswers()
    await answered(answers, httpx2.Response(404))
    answers.is_open = True
    await answered(answers, httpx2.Response(405), "GET")
    refused = b'{"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "bad"}}'
    await answered(answers, httpx2.Response(400, headers=JSON, content=refused))
    assert answers.problem is None


async def test_an_answer_beyond_the_bound_is_refused_before_it_is_read() -> None:
    headers = {"content-length": str(LONGEST_ANSWER + 1)}
    with pytest.raises(HttpRefused, match="bytes"):
        await answered(HttpAnswers(), httpx2.Response(200, headers=headers))


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * (1 << 20)


@pytest.mark.parametrize("status", [200, 400])
async def test_an_answer_without_a_length_is_read_up_to_the_bound(status: int) -> None:
    answers = HttpAnswers()
    answers.is_open = True
    with pytest.raises(HttpRefused, match="more than 16,777,216 bytes"):
        await answered(answers, httpx2.Response(status, headers=JSON, content=endless()))
    assert answers.problem is not None


async def test_a_compressed_answer_is_refused() -> None:
    headers = JSON | {"content-encoding": "gzip"}
    with pytest.raises(HttpRefused, match="encoding 'gzip'"):
        await answered(HttpAnswers(), httpx2.Response(200, headers=headers))


class EndlessAnswers(BaseHTTPRequestHandler):
    """A server that connects like any other, and answers a call with chunks without an end."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("method") == "tools/call":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):  # the client has had enough
                while True:
                    self.wfile.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
            self.close_connection = True
            return
        result: dict[str, Any] = {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
        if asked.get("method") == "initialize":
            result = {
                "protocolVersion": asked["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "endless", "version": "1"},
            }
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()
        self.send_response(200 if "id" in asked else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if "id" in asked else 0))
        self.end_headers()
        self.wfile.write(body if "id" in asked else b"")

    def log_message(self, *_: Any) -> None: ...


async def test_a_server_that_answers_without_an_end_is_infrastructure() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EndlessAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/mcp"
    table = McpServer(name="far", transport="http", url=url, start_s=60.0, sessions="shared")
    try:
        async with opened(table) as connections:
            with pytest.raises(ToolServerLost, match="more than 16,777,216 bytes"):
                await connections.call("a", "add", {})
    finally:
        server.shutdown()
        server.server_close()
