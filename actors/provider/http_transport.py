"""HTTP connections to providers: sends one request, returns its complete response or its loss.

HTTP/2 where a provider offers it, one pool for all teachers. The pool is unbounded, because callers
limit the number of concurrent requests.

Reads a response within limits. The sender is untrusted: an encoded body is refused, because it can
turn kilobytes into gigabytes.
"""

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar
from typing import Any

import httpx

from composer_mesh.actors.provider.endpoint import Secret, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderError,
    ProviderMalformed,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider.reply import NoResponse, ProviderReply

LARGEST_BODY = 8 * 2**20
"""In bytes."""
LARGEST_HEADERS = 64 * 2**10
PLAIN = ("", "identity")
"""Content encodings that are read."""
SHOWN_CHARS = 40


class RefusedReply(Exception):
    """A response breaks a limit and is not read to its end; its text says which one."""


async def bounded_body(response: httpx.Response) -> bytes:
    """Return the body; raises RefusedReply as soon as a limit is passed."""
    _check_headers(response.headers)
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN:
        shown = "".join(filter(str.isprintable, encoding[:SHOWN_CHARS]))
        raise RefusedReply(f"its answer is encoded as {shown!r}, and no encoding was requested")
    stream, body = response.stream, bytearray()
    assert isinstance(stream, httpx.AsyncByteStream), "an async client gave a sync stream"
    async for chunk in stream:
        body += chunk
        if len(body) > LARGEST_BODY:
            raise _too_long()
    return bytes(body)


def _check_headers(headers: httpx.Headers) -> None:
    if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEADERS:
        raise RefusedReply(f"its headers are longer than {LARGEST_HEADERS} bytes")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > LARGEST_BODY:
        raise _too_long()


def _too_long() -> RefusedReply:
    return RefusedReply(f"its answer is longer than {LARGEST_BODY} bytes")


KEPT_S = 30.0
"""Seconds an idle connection is kept for the next request."""
LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")
WIRE_LOGS = ("hpack", "httpcore", "httpx")
"""Loggers that write headers, which contain the key, and a line per request."""


class NoCookies(CookieJar):
    """A jar that stays empty: a provider sets no state, and its dates are not parsed."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Ignore the response's cookies."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to a teacher's `path`: a POST if it has content."""

    teacher: TeacherEndpoint
    path: str
    secret: Secret
    content: bytes | None = None
    request_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        if self.content is None:
            return self.secret.headers
        own = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        return {**own, **self.secret.headers}


@cache
def _authorities(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Return httpx's context, which reads these variables; loading it takes up to 0.1 s."""
    return httpx.create_ssl_context()


class HttpTransport:
    """A connection pool of one event loop."""

    def __init__(self, timeouts: Timeouts, transport: httpx.AsyncBaseTransport | None) -> None:
        for name in WIRE_LOGS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._timeouts = timeouts
        # Requests to this machine never use a proxy from the environment.
        direct: dict[str, httpx.AsyncBaseTransport | None] = dict.fromkeys(LOOPBACK)
        self._client = httpx.AsyncClient(
            http2=True,
            verify=_authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            headers={"Accept-Encoding": "identity"},
            cookies=NoCookies(),
            event_hooks={"response": [_forget_location]},
            timeout=timeouts.of_request(),
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            transport=transport,
            mounts=direct,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def send(self, outgoing: Outgoing, within_s: float) -> ProviderReply | NoResponse:
        """Return the complete response, or how the request was lost.

        Waits at most `within_s`. A cancelled request is closed.
        """
        teacher, secret = outgoing.teacher, outgoing.secret
        if self._client.is_closed:
            return NoResponse(ProviderServerError(teacher.name, "the client is closed"), sent=False)
        if within_s <= 0:
            return NoResponse(
                ProviderTimeout(teacher.name, "no time was left to send it"), sent=False
            )
        try:
            async with asyncio.timeout(within_s):
                response, raw = await self._exchange(outgoing)
        except (httpx.HTTPError, httpx.StreamError, OSError, RefusedReply) as fault:
            return self._lost(teacher.name, fault)
        headers = {name.lower(): secret.hide(text) for name, text in response.headers.items()}
        raw = secret.hide_bytes(raw)
        return ProviderReply(response.status_code, headers, raw, outgoing.request_id, secret)

    async def _exchange(self, outgoing: Outgoing) -> tuple[httpx.Response, bytes]:
        async with self._client.stream(
            "GET" if outgoing.content is None else "POST",
            outgoing.teacher.url(outgoing.path),
            content=outgoing.content,
            headers=outgoing.headers,
        ) as response:
            return response, await bounded_body(response)

    def _lost(self, teacher: str, fault: Exception) -> NoResponse:
        """Return the error of a lost request, without its text, which may hold headers."""
        error: ProviderError
        sent, name = True, type(fault).__name__
        match fault:
            case RefusedReply():
                error = ProviderMalformed(teacher, str(fault))
            case TimeoutError():
                error = ProviderTimeout(teacher, f"no answer within {self._timeouts.total_s} s")
            case httpx.ConnectTimeout():
                error, sent = ProviderTimeout(teacher, f"no connection ({name})"), False
            case httpx.TimeoutException():
                error = ProviderTimeout(teacher, f"it fell silent ({name})")
            case httpx.ConnectError():
                error, sent = ProviderServerError(teacher, f"no connection ({name})"), False
            case _:
                error = ProviderServerError(teacher, f"the connection broke ({name})")
        return NoResponse(error, sent)


async def _forget_location(response: httpx.Response) -> None:
    """Drop where a redirect leads: it is not followed, and httpx fails on what is no address."""
    response.headers.pop("location", None)
