"""The list of a server's tools, as a config pins it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from composer_mesh.actors.mcp_servers.untrusted_text import (
    LONGEST_DESCRIPTION,
    LONGEST_PARAMETERS,
    clean,
    clean_json,
)
from composer_mesh.configs.mcp import MOST_TOOLS, McpServer, McpTool
from composer_mesh.tasks.errors import UnusableTask

MOST_PAGES = 20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


async def listed(client: Any, server: McpServer) -> tuple[McpTool, ...]:
    """Return the tools that a config takes from a server, in the server's order.

    Raises UnusableTask for a list that cannot be used.
    """
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        found += page.tools
        cursor = page.next_cursor
        if cursor is None or len(found) > 10 * MOST_TOOLS:
            break
    return pinned(server, found)


def pinned(server: McpServer, tools: Sequence[Any]) -> tuple[McpTool, ...]:
    """Return tools as a config pins them; raises UnusableTask."""
    names = [str(one.name) for one in tools]
    for key, wanted in (("allow", server.allow), ("deny", server.deny)):
        if missing := sorted(set(wanted) - set(names)):
            raise UnusableTask(
                f"environment.mcp: {key} of the MCP server {server.name!r} names {missing[0]!r}, "
                f"which it does not have: it has {clean(', '.join(names), 1000) or 'no tools'}"
            )
    used = [one for one in tools if _is_used(server, str(one.name))]
    if not used or len(used) > MOST_TOOLS:
        raise UnusableTask(
            f"the MCP server {server.name!r} has {len(used)} tools that are used but must have 1 "
            f"to {MOST_TOOLS}: change its allow and deny in [[environment.mcp]]"
        )
    return tuple(_pinned(server, one) for one in used)


def _is_used(server: McpServer, name: str) -> bool:
    return name not in server.deny and (not server.allow or name in server.allow)


def _pinned(server: McpServer, tool: Any) -> McpTool:
    name = clean(str(tool.name), 100)
    if not _NAME.fullmatch(str(tool.name)):
        raise UnusableTask(
            f"the MCP server {server.name!r} has a tool {name!r}, but a name is 1 to 64 letters, "
            "digits and _.-: name the tools that are used in its allow"
        )
    parameters = clean_json(tool.input_schema)
    text = json.dumps(parameters, ensure_ascii=False, sort_keys=True)
    if len(text) > LONGEST_PARAMETERS:
        raise UnusableTask(
            f"the schema of tool {name!r} of the MCP server {server.name!r} has {len(text):,} "
            f"characters but may have {LONGEST_PARAMETERS:,}: add {name!r} to its deny"
        )
    description = clean(tool.description or "", LONGEST_DESCRIPTION)
    return McpTool(name=name, description=description, parameters=text)


def difference(before: Sequence[McpTool], now: Sequence[McpTool]) -> str:
    """Return in words what has changed in tools that prompts show; empty if nothing has."""
    current = {one.name: one for one in now}
    gone = [one.name for one in before if one.name not in current]
    other = [one.name for one in before if current.get(one.name, one) != one]
    parts = [f"{', '.join(gone)} is gone"] * bool(gone)
    parts += [f"{', '.join(other)} is described differently"] * bool(other)
    return ", ".join(parts)
