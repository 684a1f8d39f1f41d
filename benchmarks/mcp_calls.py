"""Calls a second of an MCP server through a task's connections, over those of the SDK's own client.

    python benchmarks/mcp_calls.py [--quick] [--json FILE]

Both call `echo` of one stdio server in this file, `--at-once` calls at a time. The rounds alternate
between the two, and the median of each is compared: `mcp_calls_over_sdk` has to be 0.9 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer
from report import Report, arguments

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


async def measured(calls: int, at_once: int, rounds: int) -> tuple[float, float]:
    """Return the calls a second of both."""
    from composer_mesh.configs.environment import McpServer
    from composer_mesh.plugins.mcp.servers import ServerConnections

    words = [SELF, "--serve"]
    table = McpServer(
        name="echo",
        transport="stdio",
        command=sys.executable,
        args=tuple(words),
        start_s=60.0,
        processes=1,
    )
    ours = ServerConnections(table, {})
    parameters = StdioServerParameters(command=sys.executable, args=words)
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
    return median(found["ours"]), median(found["sdk"])


def main() -> int:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--at-once", type=int, default=8, metavar="N")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        server.run("stdio")
        return 0
    calls, rounds = (400, 3) if given.quick else (2_000, 7)
    report = Report("mcp_calls")
    own, theirs = asyncio.run(measured(calls, given.at_once, rounds))
    report.figures = {"calls_per_s": own, "sdk_calls_per_s": theirs}
    report.ratios["mcp_calls_over_sdk"] = own / theirs
    rows = [("ours", f"{own:,.0f}"), ("SDK", f"{theirs:,.0f}")]
    report.print_table("calls of an MCP server", ("client", "calls/s"), rows)
    report.finish(given.json)
    return int(own / theirs < BAR)


if __name__ == "__main__":
    sys.exit(main())
