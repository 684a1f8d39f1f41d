"""What is outside of a box for tests: names that resolve as they say, and one server for all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.plugins.harbor.proxy import PORT, Outside, proxied
from composer_mesh.plugins.harbor.task_toml import Network

PUBLIC = "93.184.215.14"
NAMES: dict[str, Sequence[str]] = {
    "good.org": [PUBLIC],
    "a.below.org": [PUBLIC],
    "evil.org": ["8.8.8.8"],
    "inside.org": ["10.0.0.7"],
    "mixed.org": [PUBLIC, "127.0.0.1"],
    "meta.org": ["169.254.169.254"],
    "mapped.org": ["::ffff:127.0.0.1"],
    "translated.org": ["64:ff9b::a00:7"],
    "listed.org": ["192.168.1.5"],
}
HOSTS = tuple(one for one in NAMES if one not in ("evil.org", "a.below.org"))
LISTED = Network("allowlist", (*HOSTS, "*.below.org", "192.168.1.0/24", "2606:4700::1"))
BODY = b"from outside"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + BODY


@dataclass
class FakeOutside:
    """Names that resolve as a test says, and one server for all addresses; both are noted."""

    names: dict[str, Sequence[str]] = field(default_factory=lambda: dict(NAMES))
    answer: bytes = ANSWER
    resolved: list[str] = field(default_factory=list)
    reached: list[tuple[str, int]] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    head_s: float = 60.0
    port: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def as_outside(self) -> Outside:
        return Outside(self.resolve, self.connect, self.head_s)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve whatever is connected to."""
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    async def resolve(self, name: str) -> Sequence[str]:
        self.resolved.append(name)
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.names[name]

    async def connect(self, address: str, port: int) -> Any:
        self.reached.append((address, port))
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note what arrives; answer the first piece, and echo nothing else."""
        try:
            while piece := await reader.read(1 << 16):
                self.received.append(piece)
                writer.write(self.answer)
        except ConnectionError:
            pass
        writer.close()
        self.ended.set()


@dataclass
class BoxPort:
    """A container that is only a port on loopback."""

    port: int = 0

    async def listen(self, port: int) -> socket.socket:
        assert port == PORT
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        return listening


@asynccontextmanager
async def opened(outside: FakeOutside, network: Network = LISTED) -> AsyncIterator[BoxPort]:
    """Open a proxy to an outside, for a box that is only a port."""
    box = BoxPort()
    async with outside.serving(), proxied(box, network, outside.as_outside):  # type: ignore[arg-type]
        yield box


async def said(box: BoxPort, *pieces: bytes) -> bytes:
    """Send pieces to the proxy; return all that it says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
    try:
        for piece in pieces:
            writer.write(piece)
        async with asyncio.timeout(60):
            return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()
