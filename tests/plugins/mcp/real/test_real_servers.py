"""Real servers over stdio: their tools are listed and called, and their refusals are read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.environment import McpServer, McpTool
from composer_mesh.plugins.mcp.servers import ServerConnections
from composer_mesh.tasks.errors import ToolError


def served(command: Path, *args: str, **keys: Any) -> McpServer:
    given = {"command": str(command), "args": args, "start_s": 120.0, "processes": 1, **keys}
    return McpServer(name="real", transport="stdio", **given)


def asked(server: McpServer, *calls: tuple[str, dict[str, Any]]) -> tuple[list[str], list[McpTool]]:
    """Return the texts of calls, of failed ones with their kind, and the tools."""

    async def asking() -> tuple[list[str], list[McpTool]]:
        connections = ServerConnections(server, {})
        said = []
        try:
            for name, arguments in calls:
                try:
                    said.append(await connections.call("session", name, arguments))
                except ToolError as error:
                    said.append(f"{error.kind}: {error.text}")
            return said, list(await connections.tools())
        finally:
            await connections.close()

    return asyncio.run(asking())


def test_the_server_with_everything_is_called_and_sees_no_variable_of_ours(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "1")
    program = installed / "node_modules" / ".bin" / "mcp-server-everything"
    said, tools = asked(
        served(program, "stdio"),
        ("echo", {"message": "hello"}),
        ("get-env", {}),
        ("get-tiny-image", {}),
        ("get-sum", {"a": "x"}),
    )
    assert len(tools) >= 10
    assert "hello" in said[0]
    assert "PATH" in json.loads(said[1])
    assert "SECRET_OF_THE_TEST" not in said[1]
    assert "[image: image/png]" in said[2]
    assert said[3].startswith("mcp_tool_error: ")


def test_the_file_server_reads_in_its_folder_and_refuses_others(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("a line")
    program = installed / "node_modules" / ".bin" / "mcp-server-filesystem"
    said, tools = asked(
        served(program, str(tmp_path), allow=("read_text_file", "list_directory")),
        ("read_text_file", {"path": str(tmp_path / "note.txt")}),
        ("read_text_file", {"path": "/etc/passwd"}),
    )
    assert [one.name for one in tools] == ["read_text_file", "list_directory"]
    assert said[0] == "a line"
    assert said[1].startswith("mcp_tool_error: ")


def test_the_time_server_tells_the_time(installed: Path) -> None:
    program = installed / "bin" / "mcp-server-time"
    said, tools = asked(
        served(program, "--local-timezone", "UTC"),
        ("get_current_time", {"timezone": "UTC"}),
        ("get_current_time", {"timezone": "Nowhere/None"}),
    )
    assert {one.name for one in tools} == {"get_current_time", "convert_time"}
    assert json.loads(said[0])["timezone"] == "UTC"
    assert said[1].startswith("mcp_tool_error: ")
