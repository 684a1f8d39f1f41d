"""Connections to this process are told apart by the user who opened them."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from composer_mesh.mesh import connection_guard
from composer_mesh.mesh.connection_guard import (
    NOBODY,
    as_listed,
    guarded_accept,
    is_of_this_user,
    user_of,
)
from composer_mesh.mesh.imported_functions import function_slots


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
    from monarch import _rust_bindings

    connection_guard.guard_connections()
    connection_guard.guard_connections()  # once is enough, and twice is no more
    (guarded,) = connection_guard._installed
    (slot,) = function_slots(Path(_rust_bindings.__file__), "accept4")
    assert ctypes.c_uint64.from_address(slot).value == connection_guard._address(guarded)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket that does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def test_a_stranger_is_closed_and_the_next_of_this_user_is_accepted(
    listener: socket.socket,
) -> None:
    verdicts = iter([False, False, True])
    accept = guarded_accept(connection_guard._libc().accept4, lambda _: next(verdicts))
    clients = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(3)]
    accepted = accept(listener.fileno(), None, None, 0)
    with socket.socket(fileno=accepted) as end:
        assert end.getpeername() == clients[2].getsockname()
        assert [client.recv(1) for client in clients[:2]] == [b"", b""]
        assert (accept(listener.fileno(), None, None, 0), ctypes.get_errno()) == (-1, errno.EAGAIN)
    for client in clients:
        client.close()


def test_a_failure_to_decide_refuses(
    listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_connection: int) -> bool:
        raise KeyError("no table")

    accept = guarded_accept(connection_guard._libc().accept4, fails)
    with socket.create_connection(listener.getsockname(), 5.0) as client:
        assert accept(listener.fileno(), None, None, 0) == -1
        assert client.recv(1) == b""
    assert "a connection was refused: KeyError('no table')" in capsys.readouterr().err
