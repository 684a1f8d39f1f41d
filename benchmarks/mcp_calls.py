"""Calls a second of an MCP server through a task's connections, over those of the SDK's own client.

    python benchmarks/mcp_calls.py --json mcp_calls.json

Both call `echo` of one stdio server in this file, `--at-once` calls at a time. The rounds alternate
between the two, and the median of each is compared: `mcp_calls_over_sdk` has to be 0.9 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer

BAR = 0.9
SELF = str(Path(__file__).absolute())
server = MCPServer("echo")
Call = Callable[[dict[str, Any]], Awaitable[Any]]


@server.tool()
def echo(text: str) -> str:
    """Returns its text."""
    return text


async def calls_per_s(call: Call, count: int, at_once: int) -> float:
    """Return the calls a second of `at_once` callers that make `count` calls together."""
    began = time.perf_counter()

    async def caller() -> None:
        for _ in range(count // at_once):
            await call({"text": "hello"})

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return (count // at_once) * at_once / (time.perf_counter() - began)


async def measured(calls: int, at_once: int, rounds: int) -> dict[str, float]:
    """Return the calls a second of both, and their ratio."""
    from composer_mesh.actors.mcp_servers.server import ServerConnections
    from composer_mesh.configs.mcp import McpServer

    arguments = [SELF, "--serve"]
    table = McpServer(
        name="echo",
        transport="stdio",
        command=sys.executable,
        args=tuple(arguments),
        start_s=60.0,
        processes=1,
    )
    ours = ServerConnections(table, {})
    parameters = StdioServerParameters(command=sys.executable, args=arguments)
    found: dict[str, list[float]] = {"ours": [], "sdk": []}
    async with Client(parameters) as client:
        ways: dict[str, Call] = {
            "ours": lambda one: ours.call("session", "echo", one),
            "sdk": lambda one: client.call_tool("echo", one, read_timeout_seconds=30.0),
        }
        for call in ways.values():
            await calls_per_s(call, calls // 10, at_once)
        for _ in range(rounds):
            for name, call in ways.items():
                found[name].append(await calls_per_s(call, calls, at_once))
    await ours.close()
    own, theirs = median(found["ours"]), median(found["sdk"])
    return {
        "calls_per_s": own,
        "sdk_calls_per_s": theirs,
        "mcp_calls_over_sdk": own / theirs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        server.run("stdio")
        return 0
    figures = asyncio.run(measured(arguments.calls, arguments.at_once, arguments.rounds))
    for name, value in figures.items():
        print(f"{name:22} {value:10.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["mcp_calls_over_sdk"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
