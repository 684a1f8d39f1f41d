"""Parts of lists, by the `offset` and `limit` of a request."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request

MOST_LISTED = 1000


def page_of(request: Request) -> tuple[int, int]:
    """Return the first place of a list and the one after the last; raises `HTTPException`."""
    first = _number(request, "offset", 0)
    return first, first + min(MOST_LISTED, _number(request, "limit", 100))


def cursor(first: int, until: int, total: int) -> Mapping[str, int]:
    """Return where a part is in its list, as clients read it."""
    return {"offset": first, "limit": until - first, "total_count": total}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} is {text[:40]!r}: send a number from 0")
    return int(text)
