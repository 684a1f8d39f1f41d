"""Server-sent events: parts of a page as HTML, each sent when it has changed.

    data: ID OF THE ELEMENT
    data: ITS NEW CONTENT, line by line

A connection looks for changes once a second; queries of runs and files are shared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from composer_mesh.plugins.dashboard.catalog import stamp
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
)
from composer_mesh.services.directory.status import EVENTS_FILE, STATUS_FILE

LOOK_S = 1.0
SHARE = 0.001
"""Largest share of a core for each paced part of an open page."""
LONGEST_WAIT_S = 20.0
ALIVE_S = 15.0
MOST_CONNECTIONS = 64


FILES = {
    "figures": (METRICS_FILE, EVALUATIONS_FILE, STATUS_FILE, SUMMARY_FILE, EVENTS_FILE),
    "charts": (METRICS_FILE, EVALUATIONS_FILE),
    "actors": (STATUS_FILE, EVENTS_FILE),
    "mesh": (STATUS_FILE, EVENTS_FILE),
    "timeline": (TIMELINE_FILE,),
    "events": (EVENTS_FILE,),
}
"""Files of a run that the parts of its pages are made of, so that none is made anew in vain."""
PACED = frozenset({"runs", "charts"})
"""Parts that cost more the more runs there are, and the longer they are: made anew more seldom."""


@dataclass(frozen=True)
class PageParts:
    """The parts of one page; both functions may read files.

    `tokens` returns for each part, by the id of its element, what it was made of: cheap to compare.
    `html` returns the content of a part.
    """

    tokens: Callable[[], Mapping[str, object]]
    html: Callable[[str], str]


def parts_of_run(root: Path, names: Collection[str], html: Callable[[str], str]) -> PageParts:
    """Return parts of a page of one run, each made anew when one of its files has changed."""
    return PageParts(
        lambda: {name: [stamp(root / file) for file in FILES[name]] for name in names}, html
    )


class PageChanges:
    """The parts of one page that have changed since they were sent."""

    def __init__(
        self,
        parts: PageParts,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._parts, self._clock, self._cpu = parts, clock, cpu
        self._tokens: dict[str, object] = {}
        self._sent: dict[str, int] = {}
        self._next: dict[str, float] = {}

    def look(self) -> dict[str, str]:
        """Return the parts to send now."""
        now = self._clock()
        new: dict[str, str] = {}
        for name, token in self._parts.tokens().items():
            if self._tokens.get(name) == token or now < self._next.get(name, now):
                continue
            began = self._cpu()
            html = self._parts.html(name)
            self._tokens[name] = token
            if name in PACED:
                self._next[name] = now + min(LONGEST_WAIT_S, (self._cpu() - began) / SHARE)
            if self._sent.get(name) != hash(html):
                self._sent[name] = hash(html)
                new[name] = html
        return new


class LiveConnections:
    """The open connections of all pages, of which there are at most MOST_CONNECTIONS."""

    def __init__(self, most: int = MOST_CONNECTIONS, look_s: float = LOOK_S) -> None:
        self._most, self._look_s, self._open = most, look_s, 0
        self.closing = False

    def response(self, parts: PageParts) -> Response:
        """Return the answer that sends parts until the page is left: it is cancelled then."""
        if self._open >= self._most:
            return PlainTextResponse(f"{self._open} pages are open: close some\n", 503)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = self._stream(parts)
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    async def _stream(self, parts: PageParts) -> AsyncIterator[str]:
        self._open += 1
        try:
            yield "retry: 2000\n\n"
            changes, sent = PageChanges(parts), time.monotonic()
            while not self.closing:
                for name, html in (await asyncio.to_thread(changes.look)).items():
                    sent = time.monotonic()
                    yield message(name, html)
                if time.monotonic() - sent > ALIVE_S:
                    sent = time.monotonic()
                    yield ": \n\n"
                await asyncio.sleep(self._look_s)
        finally:
            self._open -= 1


def message(name: str, html: str) -> str:
    """Return one event: the id of an element, and its content."""
    lines = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"data: {name}\n{lines}\n"
