"""MCP servers of a task: programs in the container that speak JSON lines over stdin and stdout.

A server lives as long as the container. Each request is one line into a pipe in the container, and
its answer the line with its id that comes out of another. Everything here belongs to the agent's
machine: what a server answers is an observation, as the output of any command is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.plugins.harbor.machine import SETUP_S, Machine, TaskFailure
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import ToolError

VERSION = "2025-06-18"
"""Version of the protocol that is offered; a server may answer with another one."""
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


class McpPrograms:
    """The servers of one episode, and their tools."""

    def __init__(self, machine: Machine, servers: Sequence[McpServerTable]) -> None:
        self._machine, self._servers = machine, servers
        self._folders: dict[str, str] = {}
        self.tools: dict[str, list[dict[str, Any]]] = {}
        """The tools of each server, as it describes them."""

    async def start(self) -> None:
        """Start all servers and list their tools; raise TaskFailure where one does not answer.

        Each step of a task has servers of its own: those of the step before it have ended.
        """
        for server in self._servers:
            folder = f"/tmp/mcp-{secrets.token_hex(6)}"
            self._folders[server.name] = folder
            argv = ["/bin/sh", "-c", START, "sh", folder, str(server.command), *server.args]
            done = await self._machine.run_program(argv, timeout_s=SETUP_S)
            if done.exit_code != 0:
                said = done.errors.decode(errors="replace")[-300:]
                raise TaskFailure("mcp_server", f"{server.name!r} cannot be started: {said}")
            try:
                self.tools[server.name] = await self._listed(server.name)
            except ToolError as error:
                raise TaskFailure("mcp_server", f"{server.name!r}: {error.text}") from None

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
        line = json.dumps({"jsonrpc": "2.0", "method": method}) + "\n"
        argv = ["/bin/sh", "-c", SEND, "sh", self._folders[server]]
        await self._machine.run_program(argv, stdin=line.encode(), timeout_s=SETUP_S)

    async def _request(
        self, server: str, method: str, params: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Return the result of a request; raise ToolError where there is none."""
        name = f"cm-{secrets.token_hex(6)}"
        line = json.dumps({"jsonrpc": "2.0", "id": name, "method": method, "params": dict(params)})
        done = await self._machine.run_program(
            ["/bin/sh", "-c", ASK, "sh", self._folders[server], name],
            stdin=f"{line}\n".encode(),
            timeout_s=seconds,
        )
        if done.ended == "wall_time":
            raise ToolError("mcp_timeout", f"{method} took over {done.seconds:.0f} s")
        try:
            answer = json.loads(done.output)
        except (ValueError, RecursionError):
            raise ToolError("mcp_error", f"the server gave no answer to {method}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("result"), dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            said = error.get("message") if isinstance(error, dict) else "an answer without a result"
            raise ToolError("mcp_error", f"{method}: {str(said)[:500]}")
        return dict(answer["result"])


def _is_text(value: object) -> bool:
    return isinstance(value, str)
