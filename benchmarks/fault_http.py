"""Low-level HTTP server code, for responses that no library would send.

`fault_proxy` decides what is sent.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST_REQUEST = 1 << 20
CHUNK = 1 << 16


@dataclass(frozen=True)
class HttpTransport:
    """HTTP/1.1 on one connection, valid or not. Each method returns whether it can continue."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    drip_s: float

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.rstrip().split("\r\n")
        pairs = (each.partition(":") for each in rest)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = min(int(headers.get("content-length", 0)), LARGEST_REQUEST)
        return line, headers, await self.reader.readexactly(length)

    async def json(
        self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> bool:
        told = {"Content-Type": "application/json", **(headers or {})}
        return await self.send(status, json.dumps(body).encode(), told)

    async def send(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        announced: int | None = None,
    ) -> bool:
        length = len(content) if announced is None else announced
        self._head(status, {**(headers or {}), "Content-Length": str(length)})
        self.writer.write(content)
        await self.writer.drain()
        return True

    async def drip(self, content: bytes, pieces: int) -> bool:
        """Send the content in this many pieces, with waits between them."""
        self._head(200, {"Content-Length": str(len(content))})
        step = -(-len(content) // pieces)
        for start in range(0, len(content), step):
            self.writer.write(content[start : start + step])
            await self.writer.drain()
            await asyncio.sleep(self.drip_s)
        return True

    async def stream(self, size: int) -> bool:
        """Send blanks without a declared length."""
        self._head(200, {"Transfer-Encoding": "chunked"})
        piece = b"%x\r\n" % CHUNK + b" " * CHUNK + b"\r\n"
        for _ in range(0, size, CHUNK):
            self.writer.write(piece)
            await self.writer.drain()
        self.writer.write(b"0\r\n\r\n")
        return True

    async def wait_for_the_end(self) -> bool:
        """Wait until the client disconnects."""
        with contextlib.suppress(OSError):
            await self.reader.read()
        return False

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode())
