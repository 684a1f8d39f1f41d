"""Bodies are bounded each, for each client and for all, and long ones are read off the loop.

A server listens where it may, answers at once, and ends when it is stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.services.web.bodies import HANDLERS, INLINE_BYTES, Bodies
from composer_mesh.services.web.connections import ServerLimits
from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.services.web.options import ListenOptions, ServeRefused, checked_token

MOST = 1_000_000


class Served:
    """A server of one route, which tells the length of a body and the thread that read it."""

    def __init__(self) -> None:
        self.bodies = Bodies(MOST, of_one=MOST, of_all=2 * MOST)
        self.port = 0

    async def post(self, request: Request) -> Response:
        def made(body: bytes) -> dict[str, Any]:
            json.loads(body)
            own = threading.current_thread() is threading.main_thread()
            return {"length": len(body), "on_the_loop": own}

        return JSONResponse(await self.bodies.read(request, request.headers["client"], made))

    async def unfinished(self, client: str, count: int) -> asyncio.StreamWriter:
        """Send the beginning of a body; wait until the server holds it."""
        before = self.bodies.budget.total
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST / HTTP/1.1\r\nhost: x\r\nclient: {client}\r\ncontent-length: {MOST}\r\n\r\n"
        writer.write(head.encode() + b"[" * count)
        await self.held(before + count)
        return writer

    async def held(self, count: int) -> None:
        """Wait until so many bytes are held."""
        while self.bodies.budget.total != count:  # noqa: ASYNC110  of another task's reading
            await asyncio.sleep(0.001)


@asynccontextmanager
async def served(
    limits: ServerLimits | None = None,
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    server = Served()
    app = Starlette(routes=[Route("/", server.post, methods=["POST"])], exception_handlers=HANDLERS)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(http_config(app, 0, limits), listener) as server.port:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=120) as web:
                yield server, web


async def post(web: httpx.AsyncClient, client: str, length: int) -> httpx.Response:
    return await web.post("/", content=b" " * (length - 1) + b"1", headers={"client": client})


async def test_a_long_body_is_read_in_a_thread_and_a_short_one_at_once() -> None:
    async with served() as (_, web):
        assert (await post(web, "a", MOST)).json() == {"length": MOST, "on_the_loop": False}
        short = (await post(web, "a", INLINE_BYTES)).json()
        assert short == {"length": INLINE_BYTES, "on_the_loop": True}
        assert (await post(web, "a", MOST + 1)).status_code == 413


async def test_unfinished_bodies_are_bounded_for_a_client_and_for_all() -> None:
    async with served() as (server, web):
        opened = [await server.unfinished("a", MOST - 10)]
        refused = await post(web, "a", 11)
        assert (refused.status_code, "one client may hold" in refused.text) == (429, True)
        assert (await post(web, "b", MOST)).status_code == 200
        opened.append(await server.unfinished("b", MOST - 10))
        refused = await post(web, "c", 21)
        assert (refused.status_code, "all clients together" in refused.text) == (503, True)
        for writer in opened:
            writer.close()
        await server.held(0)
        assert (await post(web, "a", MOST)).status_code == 200


async def test_a_body_that_never_ends_is_held_no_longer_than_its_time() -> None:
    async with served(ServerLimits(body_s=0.2)) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nclient: a\r\ncontent-length: 9\r\n\r\n[")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await server.held(0)


async def test_a_body_that_cannot_be_read_is_held_no_more() -> None:
    async with served() as (server, web):
        for content in (b"{" * 1000, b"x" * MOST):
            reply = await web.post("/", content=content, headers={"client": "a"})
            assert reply.status_code == 500
        assert server.bodies.budget.total == 0


async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    async with served() as (server, web):
        server.bodies = Bodies(MOST, of_one=MOST, of_all=MOST, values=1000)
        reply = await web.post("/", content=b"[" + b"1," * 1001, headers={"client": "a"})
        assert reply.status_code == 413
        assert "the body has 1,001 values, above 1,000" in reply.text
        reply = await web.post("/", content=b"[" + b"1," * 1000 + b"1]", headers={"client": "a"})
        assert reply.status_code == 200


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer any request with one byte."""
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


def test_accepted_connections_do_not_wait_to_fill_packets() -> None:
    with (
        listening_socket("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_has_one_server_from_the_first_moment(host: str) -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServeRefused, match=f"port {port} .*another server.*--port"):
            listening_socket(host, port)
    listening_socket("127.0.0.1", port).close()


async def test_a_server_ends_with_its_block_after_what_it_was_told_to_do_first() -> None:
    ended: list[str] = []
    with listening_socket("127.0.0.1", 0) as listener:
        config = http_config(answer, 1)
        async with listening(config, listener, before_end=lambda: ended.append("told")) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"x\r\n0\r\n\r\n")
            writer.close()
            assert not ended
            assert sys.getswitchinterval() <= 0.0005  # a thread gives the loop its turn soon
    assert ended == ["told"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


LONG = "0123456789abcdef"


def test_beyond_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    assert checked_token(ListenOptions(), None) == ""
    assert checked_token(ListenOptions(host="::1"), None) == ""
    with pytest.raises(ServeRefused, match="--token-env"):
        checked_token(ListenOptions(host="10.0.0.7"), None)
    assert checked_token(ListenOptions(host="10.0.0.7"), "SERVED") == LONG


def test_no_process_of_the_server_inherits_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    assert checked_token(ListenOptions(), "SERVED") == LONG
    assert "SERVED" not in os.environ


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::"])
def test_public_addresses_are_named_twice(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    with pytest.raises(ServeRefused, match="--any-address"):
        checked_token(ListenOptions(host=host), "SERVED")
    assert checked_token(ListenOptions(host=host, any_address=True), "SERVED") == LONG


@pytest.mark.parametrize("token", ["", "short", "with a\nline break in it", "ключ" * 8])
def test_a_token_that_could_be_guessed_or_not_sent_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED", token)
    with pytest.raises(ServeRefused, match="at least 16 printable"):
        checked_token(ListenOptions(), "SERVED")
