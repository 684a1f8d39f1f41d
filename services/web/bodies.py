"""Reads the bodies of requests, bounded each, for each client and for all, and off the event loop.

`connections` bounds the time in which one arrives. Large bodies are parsed in a thread, one at a
time. A parser of JSON holds the interpreter's lock as long as it builds values, so a body of too
many is refused before: 20 MB of small numbers would hold up the event loop for half a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from composer_mesh.mesh.json_server import BudgetSpent, ByteBudget
from composer_mesh.services.web.errors import (
    BAD_REQUEST,
    TOO_LARGE,
    TOO_MANY,
    UNAVAILABLE,
    UNSUPPORTED,
    RequestRefused,
)

INLINE_BYTES = 256 * 1024
"""Size above which a body is read in a thread."""
MOST_VALUES = 1_000_000
"""Commas of a body, which bound the time of its parser: 0.07 s on one core of 2026."""
Read = TypeVar("Read")


class Bodies:
    """The bodies of one server process: `most` bytes each, of at most so many JSON values.

    The budget counts unfinished ones, in bytes of one client and of all.
    """

    def __init__(self, most: int, of_one: int, of_all: int, values: int = MOST_VALUES) -> None:
        self.most, self.budget, self._values = most, ByteBudget(of_one, of_all), values
        self._parsing = asyncio.Semaphore(1)

    @asynccontextmanager
    async def body(
        self, request: Request, client: str, most: int | None = None
    ) -> AsyncIterator[bytes]:
        """Read the body of a client's request; it counts as unfinished until the block ends.

        `most` is its largest size, where that is not the largest of all.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused(UNSUPPORTED, "the body is compressed: send it as it is")
        with self.budget.held_by(client) as hold:
            yield await self._whole(request, hold, most or self.most)

    async def read(
        self,
        request: Request,
        client: str,
        make: Callable[[bytes], Read],
        most: int | None = None,
    ) -> Read:
        """Return what `make` makes of a body of at most `most` bytes."""
        async with self.body(request, client, most) as body:
            return await self.made(make, body)

    async def made(self, make: Callable[..., Read], body: bytes, *more: Any) -> Read:
        """Return what `make` makes of a body, in a thread where it is long."""
        if len(body) <= INLINE_BYTES:
            return make(body, *more)
        async with self._parsing:
            return await asyncio.to_thread(make, body, *more)

    async def _whole(self, request: Request, hold: Callable[[int], None], most: int) -> bytes:
        found = bytearray()
        try:
            async for piece in request.stream():
                if len(found) + len(piece) > most:
                    raise RequestRefused(TOO_LARGE, f"the body is above {most:,} bytes: send less")
                hold(len(piece))
                found += piece
        except BudgetSpent as spent:
            raise RequestRefused(TOO_MANY if spent.own else UNAVAILABLE, str(spent)) from None
        if (values := found.count(b",")) > self._values:
            raise RequestRefused(
                TOO_LARGE, f"the body has {values:,} values, above {self._values:,}: send less"
            )
        return bytes(found)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return JSONResponse({"detail": error.text}, error.status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)


async def _gone(_: Request, error: Exception) -> Response:
    del error
    return Response(status_code=BAD_REQUEST)


HANDLERS: dict[Any, Any] = {
    RequestRefused: _refused,
    HTTPException: _http_error,
    ClientDisconnect: _gone,
}
"""How an application answers what is refused; a client that has left gets no answer."""
