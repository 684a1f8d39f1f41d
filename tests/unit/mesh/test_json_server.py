"""The base of our HTTP servers: requests and connections are bounded."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from composer_mesh.mesh import json_server
from composer_mesh.mesh.json_server import LOOPBACK, PIECE, JsonHandler, JsonServer, Refusal


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


class Server(JsonServer):
    most_connections = 2
    client_bytes, all_bytes = 3 * PIECE, 4 * PIECE


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Handler, (LOOPBACK, 0))
    server.start()
    yield server
    server.close()


def connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(LOOPBACK, server.server_port)


def post(web: http.client.HTTPConnection, body: bytes, key: str = "friend") -> tuple[int, bytes]:
    web.request("POST", "/a?b", body, {"Authorization": key})
    reply = web.getresponse()
    return reply.status, reply.read()


def test_a_refused_body_is_skipped_and_the_connection_goes_on(server: Server) -> None:
    web = connection(server)
    assert post(web, b"a" * 3 * PIECE, "stranger")[0] == 401
    before = web.sock
    assert post(web, b"abc") == (200, b'{"route": "POST /a", "length": 3}')
    assert web.sock is before
    web.close()


def test_a_too_long_body_is_refused_unread(server: Server) -> None:
    web = connection(server)
    web.putrequest("POST", "/")
    web.putheader("Content-Length", str(4 * PIECE + 1))
    web.endheaders()
    assert web.getresponse().status == 413
    web.close()


def test_another_users_connections_leave_one_for_the_owner(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([os.geteuid() + 1, os.geteuid()])
    monkeypatch.setattr(json_server, "tcp_peer_user", lambda _: next(users))
    webs = [connection(server) for _ in range(3)]
    assert post(webs[0], b"")[0] == 200
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        post(webs[1], b"")
    assert post(webs[2], b"")[0] == 200
    for web in webs:
        web.close()


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server: Server) -> None:
    web = connection(server)
    assert post(web, b"," * Handler.most_values)[0] == 200
    status, text = post(web, b"," * (Handler.most_values + 1))
    assert (status, b"has 101 values" in text) == (413, True)
    web.close()


def test_a_connection_beyond_the_bound_is_closed_and_the_others_go_on(server: Server) -> None:
    webs = [connection(server) for _ in range(3)]
    for web in webs[:2]:
        assert post(web, b"")[0] == 200
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        post(webs[2], b"")
    for web in webs[:2]:
        assert post(web, b"")[0] == 200
        web.close()
    webs[2].close()


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


def test_unfinished_bodies_have_a_bound_of_bytes_and_leave_nothing_held(server: Server) -> None:
    waiting = connection(server)
    waiting.putrequest("POST", "/")
    waiting.putheader("Authorization", "friend")
    waiting.putheader("Content-Length", str(4 * PIECE))
    waiting.endheaders(b"a" * 2 * PIECE)
    while server.bodies.total < 2 * PIECE:
        pass
    web = connection(server)
    status, text = post(web, b"a" * 2 * PIECE)
    assert (status, b"one client may hold 196,608 bytes" in text) == (429, True)
    web.close()
    waiting.close()
    while server.bodies.total:
        pass
    web = connection(server)
    assert post(web, b"a" * 3 * PIECE)[0] == 200
    assert server.bodies.total == 0
    web.close()
