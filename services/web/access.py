"""Who may ask: the Host that a request names, the Origin of a browser's page, the bearer token.

A page that a browser of this machine shows can send requests to loopback, and open WebSockets, so
each request has to name a host of the server, and a page has to come from one.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
        return 403, "pages of other hosts may not ask"
    return None


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
