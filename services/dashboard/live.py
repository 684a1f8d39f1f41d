"""Server-sent events: parts of a page as HTML, each sent when it has changed.

    data: ID OF THE ELEMENT
    data: ITS NEW CONTENT, line by line

A connection looks for changes a few times a second; what runs and files are asked is shared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

LOOK_S = 0.5
ALIVE_S = 15.0
MOST_CONNECTIONS = 64


class Parts(Protocol):
    """The parts of one page. Both may read files."""

    def tokens(self) -> Mapping[str, object]:
        """Return for each part, by the id of its element, what it was made of: cheap to compare."""
        ...

    def html(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the content of these parts."""
        ...


class Changes:
    """The parts of one page that have changed since they were sent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tokens: dict[str, object] = {}
        self._sent: dict[str, int] = {}

    def look(self) -> dict[str, str]:
        """Return the parts to send now."""
        tokens = self._parts.tokens()
        changed = [name for name, token in tokens.items() if self._tokens.get(name) != token]
        self._tokens = dict(tokens)
        found = self._parts.html(changed) if changed else {}
        new = {name: html for name, html in found.items() if self._sent.get(name) != hash(html)}
        self._sent |= {name: hash(html) for name, html in new.items()}
        return new


class LiveConnections:
    """The open connections of all pages, of which there are at most MOST_CONNECTIONS."""

    def __init__(self, most: int = MOST_CONNECTIONS, look_s: float = LOOK_S) -> None:
        self._most, self._look_s, self._open = most, look_s, 0
        self.closing = False

    def response(self, request: Request, parts: Parts) -> Response:
        """Return the answer that sends parts until the page is left."""
        if self._open >= self._most:
            return PlainTextResponse(f"{self._open} pages are open: close some\n", 503)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = self._stream(request, parts)
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    async def _stream(self, request: Request, parts: Parts) -> AsyncIterator[str]:
        self._open += 1
        try:
            yield "retry: 2000\n\n"
            changes, told = Changes(parts), time.monotonic()
            while not (self.closing or await request.is_disconnected()):
                for name, html in (await asyncio.to_thread(changes.look)).items():
                    told = time.monotonic()
                    yield message(name, html)
                if time.monotonic() - told > ALIVE_S:
                    told = time.monotonic()
                    yield ": \n\n"
                await asyncio.sleep(self._look_s)
        finally:
            self._open -= 1


def message(name: str, html: str) -> str:
    """Return one event: the id of an element, and its content."""
    lines = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"data: {name}\n{lines}\n"
