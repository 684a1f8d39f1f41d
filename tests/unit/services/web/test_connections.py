"""Connections are bounded, idle ones end, and the owner of a server is never locked out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from composer_mesh.services.web.connections import (
    FREE_CHUNKS,
    MEAN_CHUNK,
    MOST,
    WARNINGS,
    WARNINGS_S,
    Connections,
    ServerLimits,
    SparseWarnings,
)
from composer_mesh.services.web.http_server import http_config, listening, listening_socket

OTHERS = "127.0.0.2"
"""The address from which another user connects here."""
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LONG_S = 300.0


def user_by_address(there: Any, *_: Any) -> int:
    return os.geteuid() + 1 if there[0] == OTHERS else os.geteuid()


class Peer:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def asked(self) -> int | None:
        """Send a request; return the status of its answer."""
        self.send(REQUEST)
        return await self.status()

    async def status(self) -> int | None:
        """Return the status of the next answer; None for a closed connection."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return int(line.split()[1]) if line else None

    async def rest(self) -> bytes:
        """Return everything until the server has closed the connection."""
        return await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Served:
    """A server, and its connections of this test."""

    def __init__(self) -> None:
        self.port = 0
        self.under_way = asyncio.Queue[str]()
        self.peers: list[Peer] = []

    async def connected(self, address: str = "127.0.0.1") -> Peer:
        opened = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self.peers.append(Peer(*opened))
        return self.peers[-1]

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body and answer; `/stays` is never answered, and `/late` after its head."""
        more = scope["method"] == "POST"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
        self.under_way.put_nowait(scope["path"])
        if scope["path"] == "/stays":
            await asyncio.Event().wait()
        if scope["path"] == "/late":
            await asyncio.sleep(2.5)
        headers = [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})


@asynccontextmanager
async def served(limits: ServerLimits, app: Any = None) -> AsyncIterator[Served]:
    server = Served()
    config = http_config(app or server.answer, 0, limits)
    config.connections = Connections(limits, user_by_address)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(config, listener) as server.port:
            yield server
            for peer in server.peers:
                await peer.close()


async def test_idle_connections_of_another_user_beyond_the_limit_lock_nobody_out() -> None:
    limits = ServerLimits(most=8, head_s=LONG_S)
    async with served(limits) as server:
        idle = [await server.connected(OTHERS) for _ in range(5 * limits.most)]
        assert await (await server.connected()).asked() == 200
        assert await (await server.connected(OTHERS)).asked() == 200
        assert await idle[0].status() is None, "the oldest idle connection has ended"


async def test_requests_of_another_user_leave_places_for_the_owner() -> None:
    limits = ServerLimits(most=8, head_s=LONG_S)
    async with served(limits) as server:
        for _ in range(limits.for_others):
            (await server.connected(OTHERS)).send(b"GET /stays HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await server.under_way.get() == "/stays"
        refused = await (await server.connected(OTHERS)).rest()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"connections are taken" in refused
        assert await (await server.connected()).asked() == 200


async def test_the_owners_own_idle_connections_lock_nobody_out() -> None:
    async with served(ServerLimits(most=8, head_s=LONG_S)) as server:
        for _ in range(40):
            await server.connected()
        assert await (await server.connected()).asked() == 200


async def test_a_connection_that_sends_nothing_ends() -> None:
    async with served(ServerLimits(head_s=0.05)) as server:
        assert await (await server.connected()).rest() == b""


@pytest.mark.parametrize(
    ("limits", "begun", "piece", "part"),
    [
        (ServerLimits(head_s=0.3), b"GET / HTTP/1.1\r\n", b"x: 1\r\n", "headers"),
        (
            ServerLimits(body_s=0.3),
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n",
            b"x",
            "body",
        ),
    ],
)
async def test_a_request_that_arrives_byte_by_byte_is_refused(
    limits: ServerLimits, begun: bytes, piece: bytes, part: str
) -> None:
    async with served(limits) as server:
        peer = await server.connected()
        peer.send(begun)
        reading = asyncio.create_task(peer.rest())
        while not reading.done():
            peer.send(piece)  # each piece in time, but never whole
            await asyncio.wait([reading], timeout=0.02)
        assert reading.result().startswith(b"HTTP/1.1 408 Request Timeout")
        assert f"the {part} did not arrive in 0.3 s".encode() in reading.result()


async def test_an_answer_may_take_longer_than_its_request() -> None:
    async with served(ServerLimits(head_s=2.0, body_s=2.0)) as server:
        peer = await server.connected()
        peer.send(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await peer.status() == 200


async def test_a_peer_that_takes_nothing_of_an_answer_loses_its_connection() -> None:
    lost = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.create_task(until_lost(receive))
        while not lost.is_set():
            await send({"type": "http.response.body", "body": bytes(10**6), "more_body": True})
            await asyncio.sleep(0)
        await leaving

    async def until_lost(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        lost.set()

    async with served(ServerLimits(sending_s=0.2), endless) as server:
        (await server.connected()).send(REQUEST)
        await lost.wait()


@pytest.mark.parametrize(
    ("soft", "most"),
    [(64, 32), (128, 64), (1024, 768), (10**6, MOST), (resource.RLIM_INFINITY, MOST)],
)
def test_the_limit_follows_that_of_descriptors(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert ServerLimits().most == most
    assert 0 < ServerLimits().for_others < most


async def test_a_body_of_many_small_chunks_is_read_no_further() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with served(ServerLimits(head_s=LONG_S, body_s=LONG_S)) as server:
        small = await server.connected()
        small.send(head + b"1\r\nx\r\n" * 3 * FREE_CHUNKS)
        assert await small.status() == 400
        large = await server.connected()
        one = b"%x\r\n%s\r\n" % (2 * MEAN_CHUNK, b"x" * 2 * MEAN_CHUNK)
        large.send(head + one * 3 * FREE_CHUNKS + b"0\r\n\r\n")
        assert await large.status() == 200


async def test_malformed_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served(ServerLimits(head_s=LONG_S)) as server:
        for _ in range(2 * WARNINGS):
            peer = await server.connected()
            peer.send(b"NO HTTP\r\n\r\n")
            assert await peer.status() == 400
            await peer.close()
        logged = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert len([one for one in logged if one.name == "uvicorn.error"]) <= WARNINGS
        assert await (await server.connected()).asked() == 200


def test_the_next_warning_says_how_many_were_left_out_and_errors_always_pass() -> None:
    now = 0.0
    sparse = SparseWarnings(lambda: now)

    def passed(level: int) -> str | None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, "bad %s", ("line",), None)
        return record.getMessage() if sparse.filter(record) else None

    found = [passed(logging.WARNING) for _ in range(WARNINGS + 7)]
    assert found == ["bad line"] * WARNINGS + [None] * 7
    assert passed(logging.ERROR) == "bad line"
    now += WARNINGS_S
    assert passed(logging.WARNING) == "bad line (7 warnings before were left out)"
    assert passed(logging.WARNING) == "bad line"
