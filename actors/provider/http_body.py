"""Reads a response within limits that hold for what is sent and for what it decodes to.

The sender is untrusted: gzip is decoded by us, piece by piece, and any other encoding is refused,
also gzip inside gzip, which turns kilobytes into gigabytes.
"""

import zlib
from collections.abc import AsyncIterator

import httpx

LARGEST_BODY = 8 * 2**20
"""Bytes, also after decoding."""
LARGEST_HEADERS = 64 * 2**10
ACCEPTED = "gzip"
"""The only content encoding that a request asks for."""
PLAIN = ("", "identity")
GZIPPED = ("gzip", "x-gzip")
GZIP_WINDOW = 16 + zlib.MAX_WBITS
SHOWN_CHARS = 40


class RefusedReply(Exception):
    """A response breaks a limit and is not read to its end; its text says which one."""


async def bounded_body(response: httpx.Response) -> bytes:
    """Return the decoded body; raises RefusedReply as soon as a limit is passed."""
    _check_headers(response.headers)
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in PLAIN:
        return await _joined(_chunks(response))
    if encoding in GZIPPED:
        return await _joined(_unzipped(_chunks(response)))
    shown = "".join(filter(str.isprintable, encoding[:SHOWN_CHARS]))
    raise RefusedReply(f"its answer is encoded as {shown!r}, and only gzip was asked for")


def _check_headers(headers: httpx.Headers) -> None:
    if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEADERS:
        raise RefusedReply(f"its headers are longer than {LARGEST_HEADERS} bytes")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > LARGEST_BODY:
        raise _too_long()


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the bytes as they were sent: httpx would decode all of a piece at once."""
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream), "an async client gave a sync stream"
    async for chunk in stream:
        yield chunk


async def _unzipped(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Decode one gzip member; never makes more than one byte above the limit at once."""
    decoder = zlib.decompressobj(GZIP_WINDOW)
    async for chunk in chunks:
        try:
            yield decoder.decompress(chunk, LARGEST_BODY + 1)
        except zlib.error:
            raise RefusedReply("its answer says that it is gzip, and is not") from None
        if decoder.unconsumed_tail:
            raise _too_long()
        if decoder.unused_data:
            raise RefusedReply("its answer goes on after the end of its gzip data")
    if not decoder.eof:
        raise RefusedReply("its answer ends before its gzip data does")


async def _joined(chunks: AsyncIterator[bytes]) -> bytes:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > LARGEST_BODY:
            raise _too_long()
    return bytes(body)


def _too_long() -> RefusedReply:
    return RefusedReply(f"its answer is longer than {LARGEST_BODY} bytes")
