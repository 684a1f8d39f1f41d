"""Reads the bodies of requests: bounded in size and time, before anything is made of them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from composer_mesh.services.web.errors import TOO_LARGE, UNSUPPORTED, Refused

BODY_S = 60.0
"""Seconds in which a request has to arrive."""


async def read_body(request: Request, most_mb: float) -> bytes:
    """Return the body; refused where it is too long or slow, before it is whole."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(UNSUPPORTED, "the body is compressed: send it as it is")
    most = int(most_mb * 1e6)
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    raise Refused(TOO_LARGE, f"the body is above {most:,} bytes: send less")
    except TimeoutError:
        raise Refused(408, f"the body did not arrive in {BODY_S:g} s: send it faster") from None
    return bytes(found)
