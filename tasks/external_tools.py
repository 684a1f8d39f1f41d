"""Tools that other programs offer: MCP servers. Reads their descriptions; starts and calls nothing.

The descriptions are those that the config states, so that every process of a run has the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from composer_mesh.configs.mcp import McpServer, McpTool
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.tool import ToolSpec


@dataclass(frozen=True)
class ExternalTool:
    """A tool of a server: the `name` that agents see, and the one that its server knows."""

    name: str
    server: str
    remote: str
    description: str
    parameters: Mapping[str, Any]

    errors: ClassVar[Mapping[type[Exception], str]] = {}
    """As of a `ToolSpec`: its calls raise none that would be mapped."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's `tools` parameter."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are: the server checks them."""
        return dict(arguments)

    async def function(self) -> None:
        """Tell that a call has to be awaited; the call itself is made by the session."""


class ToolServers(Protocol):
    """Calls the tools of servers for sessions, which it knows by their keys."""

    async def call(self, key: str, tool: ExternalTool, arguments: Mapping[str, Any]) -> str:
        """Return the text of a result. Raises ToolError or ToolServerLost."""

    def end(self, key: str) -> None:
        """Release what is held for a session."""


def external_tools(servers: Sequence[McpServer]) -> tuple[ExternalTool, ...]:
    """Return the tools that a config states; raises UnusableTask where it states none yet."""
    found = []
    for server in servers:
        if server.tools is None:
            raise UnusableTask(
                f"the tools of the MCP server {server.name!r} are not known: the commands train, "
                "check, play, eval and ablate ask the server for them, and a run's config.toml "
                "states them; name that one"
            )
        found += [_tool(server, one) for one in server.tools]
    return tuple(found)


def with_external(
    task: str, own: Mapping[str, ToolSpec], tools: Sequence[ExternalTool]
) -> dict[str, ToolSpec | ExternalTool]:
    """Return all tools by name; raises UnusableTask where two have the same."""
    found: dict[str, ToolSpec | ExternalTool] = dict(own)
    for one in tools:
        other = found.get(one.name)
        if other is not None:
            owner = (
                f"the MCP server {other.server!r}"
                if isinstance(other, ExternalTool)
                else f"task {task!r}"
            )
            raise UnusableTask(
                f"the MCP server {one.server!r} and {owner} both have a tool {one.name!r}: set "
                f'prefix = "{one.server}_" in its table of [[environment.mcp]], or add '
                f"{one.remote!r} to its deny"
            )
        found[one.name] = one
    return found


def _tool(server: McpServer, tool: McpTool) -> ExternalTool:
    try:
        parameters = json.loads(tool.parameters)
    except ValueError as error:
        raise UnusableTask(
            f"parameters of tool {tool.name!r} of the MCP server {server.name!r} are no JSON "
            f"({error}): remove environment.mcp.*.tools, which the run writes"
        ) from None
    if not isinstance(parameters, dict):
        raise UnusableTask(
            f"parameters of tool {tool.name!r} of the MCP server {server.name!r} are a "
            f"{type(parameters).__name__} but must be an object: remove environment.mcp.*.tools"
        )
    name = f"{server.prefix}{tool.name}"
    return ExternalTool(name, server.name, tool.name, tool.description, parameters)
