"""The base of our HTTP servers: requests and connections are bounded.

Bytes that clients hold are bounded for each and for all, and released in any end.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from composer_mesh.mesh import json_server
from composer_mesh.mesh.json_server import (
    LOOPBACK,
    PIECE,
    BudgetSpent,
    ByteBudget,
    JsonHandler,
    JsonServer,
    Refusal,
)


class Handler(JsonHandler):
    """Tells how long the body was; only the friend may ask."""

    server_version = "test"
    largest_request = 4 * PIECE
    timeout = body_s = 60.0
    most_values = 100

    def authorize(self) -> None:
        if self.headers.get("Authorization") != "friend":
            raise Refusal(HTTPStatus.UNAUTHORIZED, "you are no friend")

    def respond(self, route: str, body: bytes) -> dict[str, Any]:
        return {"route": route, "length": len(body)}


Connect = Callable[[], http.client.HTTPConnection]


class Server(JsonServer):
    most_connections = 2
    client_bytes, all_bytes = 3 * PIECE, 4 * PIECE


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Handler, (LOOPBACK, 0))
    server.start()
    yield server
    server.close()


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    """Connects clients, which are closed before the server."""
    with contextlib.ExitStack() as opened:

        def connect() -> http.client.HTTPConnection:
            web = http.client.HTTPConnection(LOOPBACK, server.server_port)
            return opened.enter_context(contextlib.closing(web))

        yield connect


def post(web: http.client.HTTPConnection, body: bytes, key: str = "friend") -> tuple[int, bytes]:
    web.request("POST", "/a?b", body, {"Authorization": key})
    reply = web.getresponse()
    return reply.status, reply.read()


def test_a_refused_body_is_skipped_and_the_connection_goes_on(connect: Connect) -> None:
    web = connect()
    assert post(web, b"a" * 3 * PIECE, "stranger")[0] == 401
    before = web.sock
    assert post(web, b"abc") == (200, b'{"route": "POST /a", "length": 3}')
    assert web.sock is before


def test_a_too_long_body_is_refused_unread(connect: Connect) -> None:
    web = connect()
    web.putrequest("POST", "/")
    web.putheader("Content-Length", str(4 * PIECE + 1))
    web.endheaders()
    assert web.getresponse().status == 413


def test_another_users_connections_leave_one_for_the_owner(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([os.geteuid() + 1, os.geteuid()])
    monkeypatch.setattr(json_server, "tcp_peer_user", lambda _: next(users))
    webs = [connect() for _ in range(3)]
    assert post(webs[0], b"")[0] == 200
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        post(webs[1], b"")
    assert post(webs[2], b"")[0] == 200


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(connect: Connect) -> None:
    web = connect()
    assert post(web, b"," * Handler.most_values)[0] == 200
    status, text = post(web, b"," * (Handler.most_values + 1))
    assert (status, b"has 101 values" in text) == (413, True)


def test_a_connection_beyond_the_bound_is_closed_and_the_others_go_on(connect: Connect) -> None:
    webs = [connect() for _ in range(3)]
    for web in webs[:2]:
        assert post(web, b"")[0] == 200
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        post(webs[2], b"")
    for web in webs[:2]:
        assert post(web, b"")[0] == 200


class SlowHead(Handler):
    timeout = 0.3


class SlowBody(Handler):
    body_s = 0.3


@pytest.mark.parametrize(
    ("handler", "begun", "piece", "answer"),
    [
        (SlowHead, b"GET / HTTP/1.1\r\n", b"x: 1\r\n", b""),
        (
            SlowBody,
            b"POST / HTTP/1.1\r\nAuthorization: friend\r\nContent-Length: 99999\r\n\r\n",
            b"x",
            b"HTTP/1.1 408 ",
        ),
        (SlowBody, b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n", b"x", b"HTTP/1.1 408 "),
    ],
)
def test_a_request_that_arrives_byte_by_byte_ends(
    handler: type[Handler], begun: bytes, piece: bytes, answer: bytes
) -> None:
    server = Server(handler, (LOOPBACK, 0))
    server.start()
    found: list[bytes] = []
    with socket.create_connection((LOOPBACK, server.server_port)) as line:
        line.sendall(begun)
        line.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            while not found or found[-1]:
                with contextlib.suppress(TimeoutError):
                    found.append(line.recv(PIECE))
                with contextlib.suppress(ConnectionError):
                    line.sendall(piece)  # each piece in time, but never whole
    assert b"".join(found)[:13] == answer
    server.close()


def test_unfinished_bodies_have_a_bound_of_bytes_and_leave_nothing_held(
    server: Server, connect: Connect
) -> None:
    waiting = connect()
    waiting.putrequest("POST", "/")
    waiting.putheader("Authorization", "friend")
    waiting.putheader("Content-Length", str(4 * PIECE))
    waiting.endheaders(b"a" * 2 * PIECE)
    while server.bodies.total < 2 * PIECE:
        pass
    web = connect()
    status, text = post(web, b"a" * 2 * PIECE)
    assert (status, b"one client may hold 196,608 bytes" in text) == (429, True)
    waiting.close()
    while server.bodies.total:
        pass
    web = connect()
    assert post(web, b"a" * 3 * PIECE)[0] == 200
    assert server.bodies.total == 0


def test_a_client_is_bounded_by_its_own_bytes_and_by_those_of_all() -> None:
    budget = ByteBudget(of_one=10, of_all=15)
    with budget.held_by("a") as first, budget.held_by("b") as second, budget.held_by("c") as third:
        first(10)
        with pytest.raises(BudgetSpent, match=r"one client may hold 10 bytes"):
            first(1)
        second(5)
        with pytest.raises(BudgetSpent, match="all clients together may hold 15 bytes") as spent:
            third(1)
        assert not spent.value.own
    assert budget.total == 0


def test_bytes_of_a_request_that_failed_are_released() -> None:
    budget = ByteBudget(of_one=10, of_all=10)
    for _ in range(3):
        with contextlib.suppress(BudgetSpent), budget.held_by("a") as held:
            held(7)
            held(7)
    assert budget.total == 0
    with budget.held_by("a") as held:
        held(10)
