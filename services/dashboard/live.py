"""Server-sent events: parts of a page as HTML, each sent when it has changed.

    data: ID OF THE ELEMENT
    data: ITS NEW CONTENT, line by line

A connection looks for changes a few times a second; what runs and files are asked is shared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

LOOK_S = 0.5
ALIVE_S = 15.0
MOST_CONNECTIONS = 64

Parts = Callable[[], Mapping[str, str]]
"""Returns the parts of a page by the ids of their elements; may read files."""


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
            sent: dict[str, int] = {}
            told = time.monotonic()
            while not (self.closing or await request.is_disconnected()):
                for name, html in (await asyncio.to_thread(parts)).items():
                    if sent.get(name) != (known := hash(html)):
                        sent[name], told = known, time.monotonic()
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
