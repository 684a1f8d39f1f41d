"""The base of our HTTP servers: requests and connections are bounded."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from composer_mesh.mesh.json_server import LOOPBACK, PIECE, JsonHandler, JsonServer, Refusal


class Handler(JsonHandler):
    """Tells how long the body was; only the friend may ask."""

    server_version = "test"
    largest_request = 4 * PIECE

    def authorize(self) -> None:
        if self.headers.get("Authorization") != "friend":
            raise Refusal(HTTPStatus.UNAUTHORIZED, "you are no friend")

    def respond(self, route: str, body: bytes) -> dict[str, Any]:
        return {"route": route, "length": len(body)}


class Server(JsonServer):
    most_connections = 2


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
