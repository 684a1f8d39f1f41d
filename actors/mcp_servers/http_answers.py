"""HTTP answers of an MCP server that end its connection, rather than being told to the agent.

The SDK turns a status such as 503, or 404 for a session that the server no longer knows, into an
error of the call; but it says nothing about the call.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID
from mcp_types import INVALID_PARAMS

BAD_REQUEST = 400
LONGEST_ANSWER = 16 << 20
"""Bytes of the longest answer that is not a stream of events, which the SDK bounds by event."""

PLAIN = {"Accept-Encoding": "identity"}
"""A header of all requests: a compressed answer could be far larger than what is read of it."""

MEANINGS = {
    401: "it refuses the token",
    403: "it refuses the token",
    404: "it no longer knows the session, or the path of url",
    429: "it has too many requests",
}


class HttpAnswers:
    """Reads the answers of one connection, as a hook of its HTTP client."""

    def __init__(self) -> None:
        self.has_session = False
        """Whether the server has given the connection a session."""

        self.is_open = False
        """Whether calls are made; while it connects, the SDK tries what a server knows."""

        self.problem: str | None = None
        """Why the connection has ended; None while it has not."""

    async def read(self, response: Any) -> None:
        """Raise HttpRefused for an answer that is no answer to a call."""
        self.has_session |= MCP_SESSION_ID in response.headers
        if (coding := response.headers.get("content-encoding", "identity")) != "identity":
            raise self._refused(f"it answered in the encoding {coding[:40]!r}, not plainly")
        if int(response.headers.get("content-length", 0)) > LONGEST_ANSWER:
            raise self._too_long()
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._too_long)
        if self.is_open and response.request.method == "POST" and response.status_code >= 400:
            if response.status_code == BAD_REQUEST and _refuses_arguments(await response.aread()):
                return
            status = response.status_code
            raise self._refused(f"{MEANINGS.get(status, 'it failed')} (status {status})")

    def _too_long(self) -> HttpRefused:
        return self._refused(f"it answered with more than {LONGEST_ANSWER:,} bytes")

    def _refused(self, problem: str) -> HttpRefused:
        self.problem = problem
        return HttpRefused(problem)


class HttpRefused(Exception):
    """An answer that ends a connection."""


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, which ends with an error after `LONGEST_ANSWER` bytes."""

    def __init__(self, whole: httpx2.AsyncByteStream, too_long: Callable[[], HttpRefused]) -> None:
        self._whole, self._too_long = whole, too_long

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._whole:
            read += len(chunk)
            if read > LONGEST_ANSWER:
                raise self._too_long()
            yield chunk

    async def aclose(self) -> None:
        await self._whole.aclose()


def _refuses_arguments(body: bytes) -> bool:
    """Whether the body of a refusal is an error about a call's arguments."""
    try:
        found = json.loads(body)
        return bool(found["error"]["code"] == INVALID_PARAMS)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
