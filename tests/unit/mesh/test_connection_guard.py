"""Connections to this process are told apart by the user who opened them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from composer_mesh.mesh import connection_guard
from composer_mesh.mesh.connection_guard import NOBODY, as_listed, is_of_this_user, user_of


def accepted(listener: socket.socket, client: socket.socket) -> Iterator[socket.socket]:
    """The listener's end of a connection."""
    with listener, client:
        listener.listen()
        client.connect(listener.getsockname())
        end, _ = listener.accept()
        with end:
            yield end


@pytest.fixture(params=["unix", "127.0.0.1", "::1", "::ffff:127.0.0.1"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """A connection of this process to itself, by each kind of socket."""
    if request.param == "unix":
        family, place = socket.AF_UNIX, str(tmp_path / "s")
    else:
        family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
        place = (request.param, 0)
    listener = socket.socket(family)
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        pytest.skip(f"this machine has no {request.param}: {error}")
    yield from accepted(listener, socket.socket(family))


def test_a_connection_of_this_process_is_of_this_user(connection: socket.socket) -> None:
    assert user_of(connection.fileno()) == os.geteuid()
    assert is_of_this_user(connection.fileno())
    connection.send(b"and stays open")


def test_a_client_of_ipv4_is_found_behind_a_listener_of_both() -> None:
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("::", 0))
    listener.listen()
    with listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        end, _ = listener.accept()
        with end:
            assert user_of(end.fileno()) == os.geteuid()


@pytest.mark.parametrize("lingers", [True, False])
def test_a_client_that_closed_its_end_is_nobody_and_not_root(lingers: bool) -> None:
    """The kernel lists what remains of its socket with user 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        end, _ = listener.accept()
        if not lingers:  # it is reset, and leaves nothing
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with end:
            assert user_of(end.fileno()) == NOBODY
            assert not is_of_this_user(end.fileno())


def test_addresses_are_written_as_the_kernel_lists_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listed = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()]
        assert as_listed(ip_address("127.0.0.1"), port) in listed


def test_the_library_of_monarch_accepts_through_the_guard() -> None:
    connection_guard.guard_connections()
    connection_guard.guard_connections()  # once is enough, and twice is no more
    assert len(connection_guard._installed) == 1
