"""Who asks: the key of a request is its client, and only known ones are served beyond loopback."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from composer_mesh.services.web.errors import UNAUTHORIZED
from composer_mesh.services.web.http_server import host_refusal

CLIENT = "client"
"""Key of a request's state with the client that sent it."""
OPEN_PATHS = frozenset({"/api/v1/healthz"})
SIGNED = "/api/v1/archives/"
"""Beginning of paths that bring their own signature."""
LONGEST_KEY = 1000


class ClientAccess:
    """Lets requests through that name a known host, and a known key where there are `keys`.

    Without keys, on loopback, each key is a client of its own, and none is a client too.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], keys: Sequence[str]) -> None:
        self._app, self._names = app, {name.lower() for name in names}
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no sockets"})
            return
        headers = Headers(scope=scope)
        refusal = host_refusal(headers, self._names) or self._refused(scope["path"], headers)
        if refusal is not None:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(scope, receive, send)
            return
        scope.setdefault("state", {})[CLIENT] = client_of(_key(headers))
        await self._app(scope, receive, send)

    def _refused(self, path: str, headers: Headers) -> tuple[int, str] | None:
        if not self._keys or path in OPEN_PATHS or path.startswith(SIGNED):
            return None
        given = _key(headers).encode(errors="replace")
        known = [hmac.compare_digest(given, key) for key in self._keys]
        return None if any(known) else (UNAUTHORIZED, "send a key of this server: X-API-Key: KEY")


def client(request: Request) -> str:
    """Return the client that sent a request."""
    return str(request.scope["state"][CLIENT])


def client_of(key: str) -> str:
    """Return the name of the client with a key, which does not tell the key."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:32]


def _key(headers: Headers) -> str:
    own = headers.get("x-api-key")
    if own is None:
        own = headers.get("authorization", "").removeprefix("Bearer ")
    return own[:LONGEST_KEY]
