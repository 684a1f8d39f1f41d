"""Sessions of MCP by the real client, when they are idle and end, and which process they reach."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from served_tasks import Count, Counting, pool_of, worker_start
from starlette.exceptions import HTTPException
from starlette.requests import Request

from composer_mesh.plugins.openenv.server.mcp import Forwarding, McpAnswer, McpSessions
from composer_mesh.plugins.openenv.server.worker import Worker
from composer_mesh.services.web.http_server import listening_socket


class Hanging(Counting):
    """Its tool `hang` returns when the test says so."""

    never: ClassVar[threading.Event] = threading.Event()


class CountHanging(Count):
    """Count with a tool that hangs."""

    session_class = Hanging


async def asked(
    sessions: McpSessions, session_id: str | None, method: str, **params: Any
) -> McpAnswer:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return await sessions.post(json.dumps(body).encode(), session_id, {})


async def test_a_session_is_not_idle_during_a_call_and_ends_after_it_where_that_was_asked(
    tmp_path: Path,
) -> None:
    Hanging.never.clear()
    sessions = McpSessions(pool_of(tmp_path, CountHanging.create()), 0)
    begun = await asked(sessions, None, "initialize", protocolVersion="2025-06-18")
    name = begun.session_id
    calls = [
        asyncio.create_task(asked(sessions, name, "tools/call", name="hang", arguments={}))
        for _ in range(2)
    ]
    await asyncio.sleep(0)  # the first one waits for its tool, the second for the first
    assert sessions._open[name].expires.cancelled()
    deleted = asyncio.create_task(sessions.delete(name))
    await asyncio.sleep(0)
    Hanging.never.set()
    answers = [(await one).status for one in calls]
    assert (answers, await deleted, sessions._open) == ([200, 404], True, {})


async def test_a_session_is_idle_again_after_a_call(tmp_path: Path) -> None:
    sessions = McpSessions(pool_of(tmp_path), 0)
    name = (await asked(sessions, None, "initialize", protocolVersion="2025-06-18")).session_id
    await asked(sessions, name, "tools/call", name="add", arguments={"by": 1})
    assert not sessions._open[name].expires.cancelled()
    await sessions.close()


def request() -> Request:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"cookie", b"not forwarded")],
    }
    return Request(scope)


async def test_an_answer_of_another_process_is_passed_on(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"body"))
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Type: a/b\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    forwarding = Forwarding(tmp_path, 2, 0)
    async with await asyncio.start_unix_server(answer, forwarding.path(1)):
        found = await forwarding.forward(1, request(), b"body")
        await forwarding.close()
    assert (found.status_code, found.media_type, found.body) == (201, "a/b", b"hi")
    assert b"cookie" not in heard[0]


async def test_a_process_that_is_gone_has_lost_its_sessions(tmp_path: Path) -> None:
    forwarding = Forwarding(tmp_path, 2, 0)
    with pytest.raises(HTTPException, match="gone") as error:
        await forwarding.forward(1, request(), b"")
    await forwarding.close()
    assert error.value.status_code == 404


async def test_a_process_that_does_not_answer_still_has_its_sessions(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the one who asked has gone
        asked.set()
        writer.close()

    forwarding = Forwarding(tmp_path, 2, 0, deadline_s=0.2)
    async with await asyncio.start_unix_server(stand_still, forwarding.path(1)):
        with pytest.raises(HTTPException, match=r"not answered for 0\.2 s") as error:
            await forwarding.forward(1, request(), b"")
        await forwarding.close()
        await asked.wait()
    assert error.value.status_code == 504


INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}


@asynccontextmanager
async def server(folder: Path, build_config: Any, **options: Any) -> AsyncIterator[str]:
    config = build_config(data={"task": "served_tasks:Count"})
    listener = listening_socket("127.0.0.1", 0)
    async with Worker(worker_start(folder, config, **options)).serving(listener) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_client_of_mcp_plays_an_episode(
    tmp_path: Path, build_config: Any, mode: Any
) -> None:
    async with (
        server(tmp_path, build_config) as url,
        Client(f"{url}/mcp?split=heldout&index=77", mode=mode) as client,
    ):
        tools = (await client.list_tools()).tools
        assert [one.name for one in tools] == ["add", "stop", "fail", "hang", "answer"]
        added = await client.call_tool("add", {"by": 4})
        assert (added.content[0].text, added.is_error) == ("count 4", False)
        wrong = await client.call_tool("add", {"by": -4})
        assert wrong.is_error
        assert wrong.meta["openenv/metadata"]["error_kind"] == "negative"
        unknown = await client.call_tool("nothing", {})
        assert unknown.is_error
        last = await client.call_tool("answer", {"text": "done"})
        assert last.meta["openenv/reward"] == pytest.approx(3.8), "two errors cost 0.1 each"
        assert last.meta["openenv/done"] is True
        with pytest.raises(MCPError, match="has ended"):
            await client.call_tool("add", {"by": 1})
    assert 77 in Counting.closed, "the client ends its session, or the server does"


async def test_each_session_of_mcp_has_an_episode_of_its_own_until_it_ends(
    tmp_path: Path, build_config: Any
) -> None:
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
    call["params"] = {"name": "add", "arguments": {"by": 1}}
    async with (
        server(tmp_path, build_config, max_sessions=2) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        begun = [await http.post("/mcp?index=1", json=INITIALIZE) for _ in range(2)]
        full = await http.post("/mcp?index=1", json=INITIALIZE)
        assert (full.status_code, full.json()["error"]["data"]["code"]) == (503, "CAPACITY_REACHED")
        sessions = [{"mcp-session-id": one.headers["mcp-session-id"]} for one in begun]
        for expected in ("count 1", "count 2"):
            for headers in sessions:
                seen = (await http.post("/mcp", json=call, headers=headers)).json()
                assert seen["result"]["content"][0]["text"] == expected
        assert (await http.delete("/mcp", headers=sessions[0])).status_code == 204
        assert (await http.post("/mcp", json=call, headers=sessions[0])).status_code == 404
        for unknown in ("", "x", "99999-a", "7-abc", "-1-a"):
            headers = {"mcp-session-id": unknown}
            assert (await http.post("/mcp", json=call, headers=headers)).status_code == 404
        assert (await http.post("/mcp?index=1", json=INITIALIZE)).status_code == 200


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"", b"{", b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}']
)
async def test_what_is_no_request_of_mcp_has_an_error_of_json_rpc(
    tmp_path: Path, build_config: Any, body: bytes
) -> None:
    async with (
        server(tmp_path, build_config) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        reply = await http.post("/mcp", content=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (200, -32600)


async def test_an_idle_session_of_mcp_ends(tmp_path: Path, build_config: Any) -> None:
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    async with (
        server(tmp_path, build_config, session_timeout_s=0.05, max_sessions=1) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        begun = await http.post("/mcp?index=1", json=INITIALIZE)
        headers = {"mcp-session-id": begun.headers["mcp-session-id"]}
        while (await http.post("/mcp?index=1", json=INITIALIZE)).status_code != 200:
            pass  # until its place is free
        assert (await http.post("/mcp", json=ping, headers=headers)).status_code == 404
