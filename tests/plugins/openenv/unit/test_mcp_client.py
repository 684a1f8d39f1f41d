"""The tools of a served task by the real MCP client, over streamable HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from served_tasks import Counting, worker_start

from composer_mesh.plugins.openenv.server.worker import Worker
from composer_mesh.services.web.http_server import listening_socket

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
        httpx.AsyncClient(base_url=url) as http,
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
    async with server(tmp_path, build_config) as url, httpx.AsyncClient(base_url=url) as http:
        reply = await http.post("/mcp", content=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (200, -32600)


async def test_an_idle_session_of_mcp_ends(tmp_path: Path, build_config: Any) -> None:
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    async with (
        server(tmp_path, build_config, session_timeout_s=0.05, max_sessions=1) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        begun = await http.post("/mcp?index=1", json=INITIALIZE)
        headers = {"mcp-session-id": begun.headers["mcp-session-id"]}
        while (await http.post("/mcp?index=1", json=INITIALIZE)).status_code != 200:
            pass  # until its place is free
        assert (await http.post("/mcp", json=ping, headers=headers)).status_code == 404
