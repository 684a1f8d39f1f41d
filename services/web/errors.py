"""Why a request is refused, with the HTTP status that clients act on.

SDKs raise for 4xx at once, but wait and come back for 408, 409, 429 and 5xx.
"""

from __future__ import annotations

BAD_REQUEST, UNAUTHORIZED, NOT_FOUND, GONE = 400, 401, 404, 410
TOO_LARGE, UNSUPPORTED, TOO_MANY, UNAVAILABLE = 413, 415, 429, 503


class RequestRefused(Exception):
    """A request that is not accepted: an HTTP status, and a text with value, bound and repair."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text

    def __str__(self) -> str:
        return self.text


def bad(text: str) -> RequestRefused:
    """Return the error for a request that its sender has to change."""
    return RequestRefused(BAD_REQUEST, text)


def unknown(kind: str, name: str) -> RequestRefused:
    """Return the error for what this client does not have; others' is as unknown as no one's."""
    return RequestRefused(
        NOT_FOUND, f"there is no {kind} {name[:120]!r} of yours here: create it first"
    )
