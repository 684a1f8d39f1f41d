"""All MCP servers of a config, as a task's sessions call them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from composer_mesh.configs.environment import McpServer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.task_sandboxes import attach_sandbox
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ExternalTool

if TYPE_CHECKING:
    from composer_mesh.actors.mcp_servers.server import ServerConnections


class McpServers:
    """The servers of a config; nothing is started before the first call."""

    def __init__(self, servers: Sequence[McpServer], environ: Mapping[str, str]) -> None:
        """`environ` has the variables that servers are given. Raises UnusableTask."""
        from composer_mesh.actors.mcp_servers.server import ServerConnections

        self._servers: dict[str, ServerConnections] = {
            one.name: ServerConnections(one, environ) for one in servers
        }

    async def call(self, key: str, tool: ExternalTool, arguments: Mapping[str, Any]) -> str:
        """Call a tool for a session; see `ServerConnections.call`."""
        return await self._servers[tool.server].call(key, tool.remote, arguments)

    def end(self, key: str) -> None:
        """Close what is open for a session; does not wait."""
        for one in self._servers.values():
            one.end(key)

    async def close(self) -> None:
        """Close all connections. Waits for the ends of the servers' processes."""
        await asyncio.gather(*(one.close() for one in self._servers.values()))


def with_tools(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the config with the tools of its servers as they describe them now.

    Starts each server to ask it, and ends it again. What a config states is kept. Raises
    UnusableTask and ToolServerLost.
    """
    servers = config.environment.mcp
    if all(one.tools is not None for one in servers):
        return config
    refuse_missing(servers, environ)
    found = asyncio.run(_with_tools(servers, environ))
    environment = config.environment.model_copy(update={"mcp": tuple(found)})
    return config.model_copy(update={"environment": environment})


def refuse_missing(servers: Sequence[McpServer], environ: Mapping[str, str]) -> None:
    """Raise UnusableTask where the SDK or a variable of a server is missing."""
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        installed = "not installed"
    if not installed.startswith("2.") or installed.startswith(("2.0.", "2.1.", "2.2.")):
        raise UnusableTask(
            f"environment.mcp names servers, but the package mcp is {installed} and must be 2.3 or "
            "a later 2.x: pip install 'composer-mesh[mcp]'"
        )
    for server in servers:
        for name in server.variables:
            if not environ.get(name):
                raise UnusableTask(
                    f"the MCP server {server.name!r} needs the environment variable {name}, which "
                    "is not set: export it, or remove it from env or token_env in its table"
                )


@contextmanager
def serving(config: Config, task: Task, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Let a task's sessions use the servers and the sandbox of a config while the block runs."""
    with ExitStack() as opened:
        if (servers := attached(config, task, environ)) is not None:
            opened.callback(lambda: asyncio.run(servers.close()))
        if (sandbox := attach_sandbox(config, task)) is not None:
            opened.callback(lambda: asyncio.run(sandbox.close()))
        yield


def attached(config: Config, task: Task, environ: Mapping[str, str]) -> McpServers | None:
    """Let a task's sessions call the servers of a config; None if it names none."""
    if not config.environment.mcp:
        return None
    refuse_missing(config.environment.mcp, environ)
    servers = McpServers(config.environment.mcp, environ)
    for part in task.parts:
        part.tool_servers = servers
    return servers


async def _with_tools(servers: Sequence[McpServer], environ: Mapping[str, str]) -> list[McpServer]:
    from composer_mesh.actors.mcp_servers.server import ServerConnections

    async def with_tools(server: McpServer) -> McpServer:
        if server.tools is not None:
            return server
        connections = ServerConnections(server, environ)
        try:
            return server.model_copy(update={"tools": await connections.tools()})
        finally:
            await connections.close()

    return list(await asyncio.gather(*(with_tools(one) for one in servers)))
