"""A server: its socket, uvicorn in its caller's event loop, and who may ask.

A page that a browser of this machine shows can send requests to loopback, and open WebSockets, so
each request has to name a host of the server, a page has to come from one, and a token has to be
brought where one is required.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from composer_mesh.mesh.json_server import ByteBudget
from composer_mesh.services.web.connections import (
    Connections,
    HttpConnection,
    ServerConfig,
    ServerLimits,
)
from composer_mesh.services.web.options import ServeRefused

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no token."""


class Access:
    """Lets requests through that name a known host and bring the token."""

    def __init__(self, app: ASGIApp, names: Collection[str], token: str) -> None:
        self._app, self._names = app, {name.lower() for name in names}
        self._expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if (refusal := host_refusal(headers, self._names)) is not None:
            return refusal
        if not self._expected or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get("authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._expected):
            return 401, "send the token: Authorization: Bearer TOKEN"
        return None


def host_refusal(headers: Headers, names: Collection[str]) -> tuple[int, str] | None:
    """Return status and text for a request that names another host, or is of another's page."""
    if _name(f"//{headers.get('host', '')}") not in names:
        return 421, "no such host here: allow it with --allow-host"
    if "origin" in headers and _name(headers["origin"]) not in names:
        return 403, "pages of other hosts may send no requests"
    return None


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


BACKLOG = 4096
"""Connections that wait in the kernel until they are accepted."""
ACCEPTED_AT_ONCE = 8
"""So few that connections cannot take all descriptors before they are counted, and that processes
which share a socket share the clients."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens, on a port that no other socket can have until it is closed.

    Raises ServeRefused for an address that this machine does not have, or a port in use.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ServeRefused(f"--host is {host}, which is not an address: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it; asyncio sets it only where a socket names its protocol, and
        # a response's headers and body, two writes, would wait 40 ms for each other.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(place)
        bound.listen(BACKLOG)  # with SO_REUSEADDR a port is exclusive from here on, not from `bind`
    except OSError as error:
        bound.close()
        taken = error.errno == errno.EADDRINUSE
        why = "another server has it" if taken else error.strerror
        raise ServeRefused(
            f"{host} port {port} cannot be listened on ({why}): stop that server, or name another "
            "--port, or 0 for a free one"
        ) from None
    return bound


def http_config(
    app: Any,
    closing_s: int,
    limits: ServerLimits | None = None,
    bodies: ByteBudget | None = None,
    **settings: Any,
) -> ServerConfig:
    """Return the settings that our servers share: no logs, no headers of proxies, no sockets.

    Requests under way have `closing_s` seconds to finish when the server ends. `bodies` bounds the
    messages of WebSockets that are not finished or not answered; without it there are none.
    """
    shared: dict[str, Any] = {
        "http": HttpConnection,
        "interface": "asgi3",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "backlog": ACCEPTED_AT_ONCE,
    }
    config = ServerConfig(app, timeout_graceful_shutdown=closing_s, **(shared | settings))
    config.connections = Connections(limits or ServerLimits())
    config.messages = bodies or ByteBudget(0, 0)
    return config


SWITCH_S = 0.0005
"""Seconds that a thread may keep the interpreter's lock from the event loop.

With the default of 0.005 each read and write of a socket waits that long while a body is parsed."""


class _Server(uvicorn.Server):
    """Leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(
    config: ServerConfig,
    *listeners: socket.socket,
    own_signals: bool = False,
    before_end: Callable[[], None] = lambda: None,
) -> AsyncIterator[int]:
    """Serve for a block; yields the port of the first socket.

    With `own_signals` SIGINT and SIGTERM end the server, else its caller handles them. `before_end`
    runs before requests under way are waited for.
    """
    sys.setswitchinterval(SWITCH_S)
    server = uvicorn.Server(config) if own_signals else _Server(config)
    running = asyncio.create_task(server.serve(list(listeners)))
    while not server.started:
        await asyncio.wait([running], timeout=0.01)
        if running.done():
            await running
            raise RuntimeError("the server has ended before it began to serve")
    for one in listeners:
        one.listen(BACKLOG)  # asyncio has lowered it to ACCEPTED_AT_ONCE
    try:
        yield int(listeners[0].getsockname()[1])
    finally:
        before_end()
        server.should_exit = True
        await running
