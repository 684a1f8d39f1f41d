"""Calls of MCP servers in process and over stdio, with a server of the tests' own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.environment import McpServer, McpTool
from composer_mesh.mesh.monarch_log import LOGS
from composer_mesh.mesh.processes import is_alive, wait_gone
from composer_mesh.plugins.mcp.servers import ServerConnections
from composer_mesh.plugins.mcp.stdio import LONGEST_RESULT
from composer_mesh.tasks.errors import ToolError, ToolServerLost, UnusableTask

FILE = Path(__file__).parents[1] / "helpers" / "mcp_example_server.py"
TOKEN = "token-of-the-tests"
Opened = Callable[..., AbstractAsyncContextManager[ServerConnections]]


def stdio(**keys: Any) -> McpServer:
    given = {"command": sys.executable, "args": (str(FILE),), "start_s": 60.0, **keys}
    return McpServer(name="example", transport="stdio", **given)


def module(**keys: Any) -> McpServer:
    return McpServer(name="example", transport="module", module="mcp_example_server:server", **keys)


@asynccontextmanager
async def opened(server: McpServer, **environ: str) -> AsyncIterator[ServerConnections]:
    connections = ServerConnections(server, environ)
    try:
        yield connections
    finally:
        await connections.close()


def text_in(folder: Path) -> str:
    return "".join(one.read_text() for one in folder.glob("mcp-example-*.log"))


@pytest.mark.parametrize("server", [stdio(), module()], ids=["stdio", "module"])
async def test_calls_of_a_server_are_answered_and_its_tools_listed(server: McpServer) -> None:
    async with opened(server) as connections:
        tools = await connections.tools()
        assert {one.name for one in tools} >= {"add", "fail", "wait"}
        assert await connections.call("s", "add", {"a": 2, "b": 3}) == "5"
        many = [connections.call("s", "add", {"a": n, "b": 1}) for n in range(20)]
        assert await asyncio.gather(*many) == [str(n + 1) for n in range(20)]


async def test_what_a_tool_says_of_its_failure_is_the_agents_error() -> None:
    async with opened(module()) as connections:
        for name, arguments in (("fail", {"why": "no"}), ("add", {"a": "x"}), ("none", {})):
            with pytest.raises(ToolError) as failed:
                await connections.call("s", name, arguments)
            assert failed.value.kind == "mcp_tool_error"


@pytest.mark.parametrize("kind", [stdio, module])
async def test_a_late_answer_is_an_error_of_its_own_kind_and_the_next_call_is_answered(
    kind: Callable[..., McpServer],
) -> None:
    async with opened(kind(call_s=5.0)) as connections:
        with pytest.raises(ToolError) as late:
            await connections.call("s", "wait", {})
        assert late.value.kind == "mcp_timeout"
        assert await connections.call("s", "add", {"a": 1, "b": 1}) == "2"


async def test_a_result_is_bounded_and_has_no_control_characters() -> None:
    async with opened(module()) as connections:
        text = await connections.call("s", "flood", {})
    assert len(text) < LONGEST_RESULT + 100
    assert text.startswith("[31mxxx")
    assert text.endswith("cut)")


async def test_a_server_that_dies_under_a_call_is_infrastructure_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOGS, str(tmp_path))
    server = stdio(env=("EXAMPLE_TOKEN",), processes=1)
    async with opened(server, EXAMPLE_TOKEN=TOKEN) as connections:
        with pytest.raises(ToolServerLost) as lost:
            await connections.call("s", "die", {})
        assert lost.value.failure_class == "infrastructure"
        assert await connections.call("s", "add", {"a": 1, "b": 1}) == "2"
    logs = text_in(tmp_path)
    assert "dying with [key]" in logs
    assert TOKEN not in f"{logs}{lost.value}"


async def test_a_program_that_is_no_server_is_infrastructure_with_its_last_line() -> None:
    server = stdio(args=("-c", "import sys; sys.exit('no such license')"))
    async with opened(server) as connections:
        with pytest.raises(ToolServerLost, match="no such license"):
            await connections.tools()


async def test_a_missing_program_and_an_address_where_nobody_listens_are_told_plainly() -> None:
    async with opened(stdio(command="no-such-program")) as connections:
        with pytest.raises(ToolServerLost, match="not installed"):
            await connections.tools()
    nobody = McpServer(name="far", transport="http", url="http://127.0.0.1:9/mcp")
    async with opened(nobody) as connections:
        with pytest.raises(ToolServerLost, match="ConnectError"):
            await connections.call("s", "add", {})


async def test_a_server_sees_only_the_variables_that_its_table_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTHER_SECRET", "1")
    async with opened(stdio(env=("EXAMPLE_TOKEN",)), EXAMPLE_TOKEN=TOKEN) as connections:
        seen = (await connections.call("s", "environment", {})).split()
        assert await connections.call("s", "key", {}) == "it is [key]"
    assert "EXAMPLE_TOKEN" in seen
    assert "OTHER_SECRET" not in seen
    allowed = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_CTYPE"}
    assert set(seen) <= {*allowed, "EXAMPLE_TOKEN"}


async def test_sessions_have_a_process_each_where_the_server_keeps_state() -> None:
    async with opened(stdio(sessions="own", processes=2)) as connections:
        first = await connections.call("a", "count", {})
        other = await connections.call("b", "count", {})
        again = await connections.call("a", "count", {})
        assert (first[0], other[0], again[0]) == ("1", "1", "2")
        assert first.split()[2] == again.split()[2] != other.split()[2]
        connections.end("a")
        assert (await connections.call("c", "count", {})).startswith("1 ")


async def test_shared_calls_take_no_more_processes_than_allowed() -> None:
    async with opened(stdio(processes=2)) as connections:
        said = await asyncio.gather(*(connections.call("s", "count", {}) for _ in range(12)))
    assert len({one.split()[2] for one in said}) <= 2


async def test_a_closed_server_leaves_no_process() -> None:
    async with opened(stdio()) as connections:
        own, child = map(int, (await connections.call("s", "leave_a_child", {})).split())
        assert is_alive(child)
    assert await wait_gone(own, 30.0)
    assert await wait_gone(child, 30.0)


async def test_a_killed_process_takes_its_servers_and_their_children_with_it() -> None:
    program = (
        "import asyncio, sys\n"
        f"sys.path.append({str(FILE.parent)!r}); sys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_server_connections import opened, stdio\n"
        "async def main():\n"
        "    async with opened(stdio()) as connections:\n"
        "        print(await connections.call('s', 'leave_a_child', {}), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    actor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert actor.stdout is not None
    own, child = map(int, (await actor.stdout.readline()).split())
    os.kill(actor.pid, signal.SIGKILL)
    await actor.wait()
    assert await wait_gone(own, 30.0)
    assert await wait_gone(child, 30.0)


async def test_a_server_whose_tools_changed_is_not_called() -> None:
    async with opened(module()) as connections:
        tools = await connections.tools()
    changed = tuple(
        McpTool(name=one.name, description="Adds.", parameters=one.parameters)
        if one.name == "add"
        else one
        for one in tools
    )
    async with opened(module(tools=changed)) as connections:
        with pytest.raises(ToolServerLost, match="add is described differently"):
            await connections.call("s", "add", {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("keys", "words"), [({"allow": ("none",)}, "'none'"), ({"deny": ("nobody",)}, "'nobody'")]
)
async def test_a_tool_that_is_not_there_cannot_be_allowed_or_denied(
    keys: dict[str, Any], words: str
) -> None:
    async with opened(module(**keys)) as connections:
        with pytest.raises(UnusableTask, match=words):
            await connections.tools()
