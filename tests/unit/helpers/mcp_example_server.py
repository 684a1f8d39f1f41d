"""An MCP server for tests: over stdio as a program, or in process as `server`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("example")
LATE_S = 600


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool()
async def wait() -> str:
    """Never answers."""
    import asyncio

    await asyncio.sleep(LATE_S)
    return "late"


@server.tool()
def environment() -> str:
    """Names the variables that this process has."""
    return " ".join(sorted(os.environ))


@server.tool()
def key() -> str:
    """Tells the key that this process was given."""
    return f"it is {os.environ.get('EXAMPLE_TOKEN')}"


@server.tool()
def flood() -> str:
    """Returns much, with control characters."""
    return "\x1b[31m\u202e" + "x" * 300_000


@server.tool()
def die() -> str:
    """Ends the process under the call."""
    sys.stderr.write(f"dying with {os.environ.get('EXAMPLE_TOKEN', 'nothing')}\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def count() -> str:
    """Counts the calls of this process."""
    count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]
    return f"{count.calls} in {os.getpid()}"  # type: ignore[attr-defined]


@server.tool()
def leave_a_child() -> str:
    """Starts a process that ignores the end of this one; returns both ids."""
    child = subprocess.Popen(["sleep", str(LATE_S)], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


@server.tool()
def block() -> str:
    """Blocks its event loop."""
    time.sleep(0.2)
    return "blocked"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("started")
    server.run("stdio")
