"""HTTP connections to providers: sends one request, returns its complete response or its loss.

HTTP/2 where a provider offers it, one pool for all teachers. The pool is unbounded, because callers
limit the number of concurrent requests.
"""

import asyncio
import logging
from dataclasses import dataclass

import httpx

from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderError,
    ProviderMalformed,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider.keys import Secret
from composer_mesh.actors.provider.reply import Lost, Reply

LARGEST_BODY = 8 * 2**20
KEPT_S = 30.0
"""Seconds an idle connection is kept for the next request."""
LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")
WIRE_LOGS = ("hpack", "httpcore", "httpx")
"""Loggers that write headers, which contain the key, and a line per request."""


class TooLong(Exception):
    """A response exceeds the size limit and is not read to its end."""


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
        told = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        return {**told, **self.secret.headers}


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
            timeout=timeouts.of_request(),
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            transport=transport,
            mounts=direct,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def send(self, outgoing: Outgoing, within_s: float) -> Reply | Lost:
        """Return the complete response, or how the request was lost.

        Waits at most `within_s`. A cancelled request is closed.
        """
        teacher, secret = outgoing.teacher, outgoing.secret
        if self._client.is_closed:
            return Lost(ProviderServerError(teacher.name, "the client is closed"), sent=False)
        if within_s <= 0:
            return Lost(ProviderTimeout(teacher.name, "no time was left to send it"), sent=False)
        try:
            async with asyncio.timeout(within_s):
                response, raw = await self._exchange(outgoing)
        except (httpx.HTTPError, httpx.StreamError, OSError, TooLong) as fault:
            return self._lost(teacher.name, fault)
        headers = {name.lower(): secret.hide(text) for name, text in response.headers.items()}
        raw = secret.hide_bytes(raw)
        return Reply(response.status_code, headers, raw, outgoing.request_id, secret)

    async def _exchange(self, outgoing: Outgoing) -> tuple[httpx.Response, bytes]:
        async with self._client.stream(
            "GET" if outgoing.content is None else "POST",
            outgoing.teacher.url(outgoing.path),
            content=outgoing.content,
            headers=outgoing.headers,
        ) as response:
            return response, await _bounded_body(response)

    def _lost(self, teacher: str, fault: Exception) -> Lost:
        """Return the error of a lost request, without its text, which may hold headers."""
        error: ProviderError
        sent, name = True, type(fault).__name__
        match fault:
            case TooLong():
                error = ProviderMalformed(
                    teacher, f"its answer is longer than {LARGEST_BODY} bytes"
                )
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
        return Lost(error, sent)


async def _bounded_body(response: httpx.Response) -> bytes:
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > LARGEST_BODY:
        raise TooLong
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise TooLong
    return bytes(body)
