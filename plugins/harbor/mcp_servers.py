"""MCP servers of a task: programs in its container, and those that its services offer by a URL.

Everything here belongs to the agent's machine: what a server answers is an observation, as the
output of any command is. A program speaks JSON lines over stdin and stdout and lives as long as the
container. Each request is one line into a pipe there; its answer is the line with its id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from composer_mesh.plugins.harbor.machine import SETUP_S, Machine
from composer_mesh.plugins.harbor.mcp_http import VERSION, EventStream, HttpServer
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import ToolError

MOST_PAGES = 20
START = (
    'd=$1; shift; mkdir -p "$d" && mkfifo "$d/in" "$d/out" || exit 1; '
    'exec 3<>"$d/in" 4<>"$d/out"; "$@" <&3 >&4 2>"$d/errors" &'
)
"""Starts a server whose pipes stay open: it holds both ends of each itself."""
SEND = 'cat > "$1/in"'
ASK = (
    f'{SEND}; while IFS= read -r line; do case "$line" in *"$2"*) printf "%s\\n" "$line"; exit 0;; '
    'esac; done < "$1/out"; exit 1'
)
"""Sends a line and prints the one that holds an id; lines of earlier requests are passed over."""


class McpTransport(Protocol):
    """The way to one server."""

    async def open(self) -> None:
        """Start the server, or wait until its URL can be connected to. Raises TaskFailure."""

    async def exchange(self, message: Mapping[str, Any], seconds: float) -> Any:
        """Send a message; return what was answered to its id, or None for one without an id.

        Raises TimeoutError, ValueError for what is no answer, and ToolError.
        """

    async def close(self) -> None:
        """Close what is open."""


class McpProgram:
    """A program in the container."""

    def __init__(self, machine: Machine, server: McpServerTable) -> None:
        self._machine, self._server = machine, server
        self._folder = ""

    async def open(self) -> None:
        """Start the program; one of an earlier step has ended with its processes."""
        self._folder = f"/tmp/mcp-{secrets.token_hex(6)}"
        command = [str(self._server.command), *self._server.args]
        argv = ["/bin/sh", "-c", START, "sh", self._folder, *command]
        done = await self._machine.run_program(argv, timeout_s=SETUP_S)
        if done.exit_code != 0:
            said = done.errors.decode(errors="replace")[-300:]
            raise TaskFailure("mcp_server", f"{self._server.name!r} cannot be started: {said}")

    async def exchange(self, message: Mapping[str, Any], seconds: float) -> Any:
        """Write a line, and read the one that has its id."""
        script = ASK if "id" in message else SEND
        done = await self._machine.run_program(
            ["/bin/sh", "-c", script, "sh", self._folder, str(message.get("id"))],
            stdin=f"{json.dumps(message)}\n".encode(),
            timeout_s=seconds,
        )
        if done.ended == "wall_time":
            raise TimeoutError
        return json.loads(done.output) if "id" in message else None

    async def close(self) -> None:
        """Do nothing: it ends with the processes of its step."""


def opened(machine: Machine, server: McpServerTable) -> McpTransport:
    """Return the way to a server, which is not opened yet."""
    if server.transport == "stdio":
        return McpProgram(machine, server)
    return (EventStream if server.transport == "sse" else HttpServer)(machine, server)


class TaskMcpServers:
    """The servers of one episode, and their tools."""

    def __init__(self, machine: Machine, servers: Sequence[McpServerTable]) -> None:
        self._servers = {one.name: opened(machine, one) for one in servers}
        self.tools: dict[str, list[dict[str, Any]]] = {}
        """The tools of each server, as it describes them."""

    async def start(self) -> None:
        """Open all servers and list their tools; raise TaskFailure where one does not answer.

        Each step of a task has sessions of its own, and programs: those of the last have ended.
        """
        for name, server in self._servers.items():
            await server.close()
            try:
                await server.open()
                self.tools[name] = await self._listed(name)
            except ToolError as error:
                raise TaskFailure("mcp_server", f"{name!r}: {error.text}") from None

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            await server.close()

    def described(self) -> str:
        """Return the part of the first message that lists the tools."""
        lines = ["Tools of MCP servers, for call_mcp_tool:"]
        for server, tools in self.tools.items():
            for tool in tools:
                shown = {key: tool.get(key) for key in ("name", "description", "inputSchema")}
                lines.append(f"- server {server}: {json.dumps(shown, ensure_ascii=False)}")
        return "\n".join(lines)

    async def call(
        self, server: str, tool: str, arguments: Mapping[str, Any], seconds: float
    ) -> str:
        """Call a tool; return its texts. Raises ToolError, also where the tool says it failed."""
        known = {one["name"] for one in self.tools.get(server, [])}
        if tool not in known:
            listed = ", ".join(
                f"{name}: {one['name']}" for name, t in self.tools.items() for one in t
            )
            text = f"no server {server[:40]!r} has a tool {tool[:40]!r}; there are {listed}"
            raise ToolError("unknown_mcp_tool", text, {"tool": tool[:40]})
        params = {"name": tool, "arguments": dict(arguments)}
        try:
            result = await self._request(server, "tools/call", params, seconds)
        except ToolError as error:
            raise ToolError(error.kind, error.text, {"tool": tool}) from None
        content = result.get("content")
        parts = content if isinstance(content, list) else []
        texts = [str(one.get("text", "")) for one in parts if isinstance(one, dict)]
        if result.get("isError"):
            raise ToolError("mcp_error", "\n".join(texts), {"tool": tool})
        return "\n".join(texts)

    async def _listed(self, server: str) -> list[dict[str, Any]]:
        client = {"name": "composer-mesh", "version": "1"}
        hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        await self._request(server, "initialize", hello, SETUP_S)
        await self._notify(server, "notifications/initialized")
        tools: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = await self._request(server, "tools/list", cursor, SETUP_S)
            listed = page.get("tools")
            every = listed if isinstance(listed, list) else []
            tools += [one for one in every if isinstance(one, dict) and _is_text(one.get("name"))]
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise ToolError("mcp_error", f"it lists tools on more than {MOST_PAGES} pages")

    async def _notify(self, server: str, method: str) -> None:
        await self._exchange(server, {"jsonrpc": "2.0", "method": method}, SETUP_S)

    async def _request(
        self, server: str, method: str, params: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Return the result of a request; raise ToolError where there is none."""
        name = f"cm-{secrets.token_hex(6)}"
        message = {"jsonrpc": "2.0", "id": name, "method": method, "params": dict(params)}
        answer = await self._exchange(server, message, seconds)
        if not isinstance(answer, dict) or not isinstance(answer.get("result"), dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            said = error.get("message") if isinstance(error, dict) else "an answer without a result"
            raise ToolError("mcp_error", f"{method}: {str(said)[:500]}")
        return dict(answer["result"])

    async def _exchange(self, server: str, message: Mapping[str, Any], seconds: float) -> Any:
        method = message["method"]
        try:
            return await self._servers[server].exchange(message, seconds)
        except TimeoutError:
            raise ToolError("mcp_timeout", f"{method} took too long") from None
        except (ValueError, RecursionError):
            raise ToolError("mcp_error", f"the server gave no answer to {method}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str)
