"""Who may see the page: the token as a cookie, which a link or a form sets; and what a page may do.

`web.http_server` checks the Host that a request names, and the Origin of other pages. Behind it,
requests bring the token: as a bearer, as the cookie, or once as `?token=` of the link that the
command prints. Without a token only the user who started the server, and root, may ask, since run
directories are their owner's alone. Requests that change a run need the Origin of this very page
and a form's own token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from composer_mesh.mesh.tcp_peer import user_at

COOKIE = "composer_mesh_session"
OPEN_PATHS = ("/static/", "/login")
ROOT = 0
ANOTHER_USER = "Only the user who started this server may use it: start your own, or use a token.\n"
UserOf = Callable[[Scope], int | None]
"""Returns the user who has sent a request, None where that is another machine."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, forms have the Origin "null"
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Sent with every answer: no script, style or request of another origin, and none inline."""


class Sessions:
    """Knows the token, and the cookie and the form token that are made of it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._secret = secrets.token_bytes(32)
        self.form = self._made("form")
        """What a form of this page sends, so that no other page can send one like it."""
        self.cookie = self._made("cookie")

    def fits(self, given: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def knows(self, headers: Headers) -> bool:
        """Whether a request brings the token, as a bearer or as a cookie."""
        if not self.token:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind == "Bearer" and self.fits(given):
            return True
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return hmac.compare_digest(cookie.encode(errors="replace"), self.cookie.encode())

    def is_own_form(self, request: Request, given: str) -> bool:
        """Whether a form comes from a page of this server: its Origin, and its token."""
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        known = hmac.compare_digest(given.encode(errors="replace"), self.form.encode())
        return request.headers.get("origin") == own and known

    def begin(self, where: str) -> Response:
        """Answer with the cookie, and continue at a path of this server."""
        response = RedirectResponse(local_path(where), 303)
        response.set_cookie(COOKIE, self.cookie, httponly=True, samesite="strict", path="/")
        return response

    def _made(self, purpose: str) -> str:
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()


class Guard:
    """Lets through what brings the token, and adds HEADERS to every answer."""

    def __init__(
        self, app: ASGIApp, sessions: Sessions, ask: ASGIApp, user_of: UserOf | None = None
    ) -> None:
        self._app, self._sessions, self._ask = app, sessions, ask
        self._user_of = user_of or user_of_peer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app = self._app if scope["type"] != "http" else self._chosen(scope)
        await app(scope, receive, send_with_headers)

    def _chosen(self, scope: Scope) -> ASGIApp:
        path = scope["path"]
        if not self._sessions.token and self._user_of(scope) not in (os.geteuid(), ROOT):
            return PlainTextResponse(ANOTHER_USER, 403)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if (given := query.pop("token", None)) and self._sessions.fits(given[0]):
            rest = urlencode(query, doseq=True)
            return self._sessions.begin(f"{path}?{rest}" if rest else path)
        if path.startswith(OPEN_PATHS) or self._sessions.knows(Headers(scope=scope)):
            return self._app
        return self._ask


def user_of_peer(scope: Scope) -> int | None:
    """Return the user who has sent a request; None from another machine."""
    there, here = scope["client"], scope["server"]
    family = socket.AF_INET6 if ":" in there[0] else socket.AF_INET
    return user_at(there, here, family)


def local_path(where: str) -> str:
    """Return a path of this server; the first page in place of an address elsewhere."""
    parts = urlsplit(where)
    if parts.scheme or parts.netloc or not where.startswith("/") or where[1:2] in ("/", "\\"):
        return "/"
    return where
