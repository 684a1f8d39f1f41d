"""Runs an application on a socket in the event loop of its caller, who handles signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

CLOSING_S = 5
BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: Any, listener: socket.socket) -> AsyncIterator[int]:
    """Serve for a block; yields the port. At its end requests under way have seconds to finish."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSING_S,
    )
    # Accepted sockets inherit it; asyncio sets it only where a socket names its protocol, and a
    # response's headers and body, two writes, would wait 40 ms for each other.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(config)
    running = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.wait([running], timeout=0.01)
        if running.done():
            await running
            raise RuntimeError("the server has ended before it began to serve")
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await running
