"""A task's MCP servers in a harness's own configuration: it opens them itself, as its user.

Codex has them in its config.toml. For the others they are in a file in the form of `.mcp.json`:
Claude Code gets it by words of its command line, a command of the user by `VARIABLE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tomli_w

from composer_mesh.plugins.harbor.harness import HOME, Launch
from composer_mesh.plugins.harbor.machine import SETUP_S
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import UnusableTask

FILE = "mcp.json"
CONFIG = f"{HOME}/{FILE}"
VARIABLE = "COMPOSER_MESH_MCP_CONFIG"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every harness takes as the name of a server."""
WITHOUT = "mini-swe-agent"
"""The harness that has no MCP."""
Servers = Sequence[McpServerTable]


def refuse_servers(harness: str, task: str, servers: Servers) -> None:
    """Raise UnusableTask where a harness takes no servers, or not one of this kind or name."""
    if servers and harness == WITHOUT:
        raise UnusableTask(
            f"Harbor task {task!r} has MCP servers, and {harness} has no MCP: leave the task out "
            "of data.path, or use claude-code, codex or a command"
        )
    for one in servers:
        if one.transport == "sse" and harness == "codex":
            raise UnusableTask(
                f"Harbor task {task!r} has the MCP server {one.name[:80]!r} with transport 'sse', "
                "and codex has stdio and streamable-http: leave the task out of data.path, or use "
                "claude-code or a command"
            )
        if not NAME.fullmatch(one.name):
            raise UnusableTask(
                f"Harbor task {task!r} has an MCP server {one.name[:80]!r}, which a harness "
                "cannot name: use 1 to 64 letters, digits, - and _"
            )


def with_servers(
    launch: Launch, task: str, servers: Servers, variables: Sequence[str] = ()
) -> Launch:
    """Return a launch whose harness has the servers of a task; the same one if there are none.

    `variables` are names that Codex is to pass on to servers, for it knows few by itself. Raises
    UnusableTask where a harness takes no servers, or not one of this kind or name.
    """
    if not servers:
        return launch
    refuse_servers(launch.harness, task, servers)
    listed = {one.name: _listed(one) for one in servers}
    if launch.harness == "codex":
        tables = {one.name: _codex_table(one, variables) for one in servers}
        config = launch.files["config.toml"] + tomli_w.dumps({"mcp_servers": tables})
        return replace(launch, files={**launch.files, "config.toml": config})
    given = replace(launch, files={**launch.files, FILE: json.dumps({"mcpServers": listed})})
    if launch.harness == "claude-code":
        allowed = ",".join(f"mcp__{name}" for name in listed)
        words = ("--mcp-config", CONFIG, "--strict-mcp-config", "--allowedTools", allowed)
        return replace(given, argv=[*launch.argv, *words])
    return replace(given, environment={**launch.environment, VARIABLE: CONFIG})


def _listed(server: McpServerTable) -> dict[str, Any]:
    """Return a server in the form of `.mcp.json`."""
    if server.transport == "stdio":
        return {"type": "stdio", "command": server.command, "args": server.args}
    kind = "sse" if server.transport == "sse" else "http"
    return {"type": kind, "url": server.url, "headers": server.headers}


def _codex_table(server: McpServerTable, variables: Sequence[str]) -> dict[str, Any]:
    """Return a server in the form of Codex's config."""
    own: dict[str, Any] = {"url": server.url, "http_headers": server.headers}
    if server.transport == "stdio":
        own = {"command": server.command, "args": server.args, "env_vars": list(variables)}
    return {
        **own,
        "startup_timeout_sec": int(SETUP_S),
        "default_tools_approval_mode": "approve",
    }
