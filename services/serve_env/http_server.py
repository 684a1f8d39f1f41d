"""Runs an application on sockets in the event loop of its caller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn


def http_config(app: Any, closing_s: int, **settings: Any) -> uvicorn.Config:
    """Return the settings that our servers share: no logs, no headers of proxies, no sockets.

    Requests under way have `closing_s` seconds to finish when the server ends.
    """
    shared: dict[str, Any] = {
        "http": "h11",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    return uvicorn.Config(app, timeout_graceful_shutdown=closing_s, **(shared | settings))


class _Server(uvicorn.Server):
    """Leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(
    config: uvicorn.Config,
    *listeners: socket.socket,
    own_signals: bool = False,
    before_end: Callable[[], None] = lambda: None,
) -> AsyncIterator[int]:
    """Serve for a block; yields the port of the first socket.

    With `own_signals` SIGINT and SIGTERM end the server, else its caller handles them. `before_end`
    runs before requests under way are waited for.
    """
    server = uvicorn.Server(config) if own_signals else _Server(config)
    running = asyncio.create_task(server.serve(list(listeners)))
    while not server.started:
        await asyncio.wait([running], timeout=0.01)
        if running.done():
            await running
            raise RuntimeError("the server has ended before it began to serve")
    try:
        yield int(listeners[0].getsockname()[1])
    finally:
        before_end()
        server.should_exit = True
        await running
