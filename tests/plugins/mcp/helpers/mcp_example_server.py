"""An MCP server for tests: over stdio as a program, in process as `server`, or over HTTP.

    python mcp_example_server.py --http PORT MODE

MODE is "sessions", or "stateless" for a server that knows none; it prints its port.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

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
def count_in_session(ctx: Context) -> str:
    """Counts the calls of an HTTP session; a session without an id is one of its own."""
    request = ctx.request_context.request
    session = request.headers.get("mcp-session-id", "") if request is not None else ""
    counts = vars(server).setdefault("counts", {})
    counts[session] = counts.get(session, 0) + 1
    return f"{counts[session]} in {session or 'none'}"


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


def serve_http(port: int, mode: str) -> None:
    """Serve over streamable HTTP; 0 takes a free port."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", port))
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app(stateless_http=mode == "stateless")
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        serve_http(int(sys.argv[2]), sys.argv[3])
        sys.exit()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("started")
    server.run("stdio")
