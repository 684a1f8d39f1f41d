"""Where a server may listen, and with what token; it answers at once, and ends when told to."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import pytest

from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.services.web.options import ListenOptions, ServeRefused, checked_token


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
