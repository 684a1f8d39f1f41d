"""A provider behind a socket of this process: it holds its answers back until a gate opens."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

from composer_mesh.rollouts.budget import NANO

COST = 0.0001


class GatedProvider:
    """Bills each request when it has read it, also those whose client dies. As a context.

    It answers with `text`, or else with what it was asked.
    """

    def __init__(self, text: str | None = None) -> None:
        self._text = text
        self.gate, self.arrived = asyncio.Event(), asyncio.Condition()
        self.requests: list[dict[str, Any]] = []
        self.base_url = ""

    @property
    def charged(self) -> int:
        """Nano-dollars."""
        return round(len(self.requests) * COST * NANO)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def has(self, requests: int) -> None:
        """Wait until so many have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = json.loads(await reader.readexactly(_length(head)))
                async with self.arrived:
                    self.requests.append(body)
                    self.arrived.notify_all()
                await self.gate.wait()
                asked = body["messages"][-1]["content"]
                writer.write(_answer(f"Answer: {asked}" if self._text is None else self._text))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done, or dead
        finally:
            writer.close()


def _length(head: bytes) -> int:
    lines = head.decode("latin-1").lower().split("\r\n")
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))


def _answer(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    content = json.dumps({"choices": [{"message": message}], "usage": {"cost": COST}}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content
