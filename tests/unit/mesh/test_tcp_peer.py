"""The user at the other end of a TCP connection of this machine is the one the kernel names.

Connections of other users are closed where Monarch accepts them, and none of this user.

The slots of a loaded library hold the functions that it calls.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from composer_mesh.mesh.connection_guard import (
    _address,
    _installed,
    _libc,
    function_slots,
    guard_connections,
    guarded_accept,
    is_of_this_user,
    user_of,
    write_slot,
)
from composer_mesh.mesh.tcp_peer import (
    NOBODY,
    End,
    Owner,
    SocketOwner,
    as_listed,
    diag_is_available,
    diag_owner,
    table_owner,
    tcp_peer_user,
)

STRANGER = 12345


@pytest.fixture(params=["netlink", "table"])
def owner(request: pytest.FixtureRequest) -> Owner:
    """Each way to ask for the owner of a socket."""
    if request.param == "table":
        return table_owner
    if not diag_is_available():
        pytest.skip("this kernel does not tell of sockets by netlink")
    return diag_owner


Accepted = Callable[..., socket.socket]


@pytest.fixture
def accepted() -> Iterator[Accepted]:
    """Connects a client to a listener; returns the listener's end of the connection."""
    ends = list[socket.socket]()

    def accepted(listener: socket.socket, client: socket.socket, to: str = "") -> socket.socket:
        listener.listen()
        at = listener.getsockname()
        client.connect((to or at[0], at[1]))
        end, _ = listener.accept()
        ends.extend((listener, client, end))
        return end

    yield accepted
    for one in ends:
        one.close()


def bound(family: socket.AddressFamily, place: str) -> socket.socket:
    made = socket.socket(family)
    try:
        made.bind((place, 0))
    except OSError as error:
        made.close()
        pytest.skip(f"this machine has no {place}: {error}")
    return made


@pytest.mark.parametrize("place", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_connection_of_this_process_is_of_this_user(
    place: str, owner: Owner, accepted: Accepted
) -> None:
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    end = accepted(bound(family, place), socket.socket(family))
    assert tcp_peer_user(end, owner) == os.geteuid()
    end.send(b"and stays open")


def test_a_client_of_ipv4_is_found_behind_a_listener_of_both(
    owner: Owner, accepted: Accepted
) -> None:
    listener = socket.socket(socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("::", 0))
    end = accepted(listener, socket.socket(socket.AF_INET), "127.0.0.1")
    assert tcp_peer_user(end, owner) == os.geteuid()


def test_a_client_that_sends_no_more_but_reads_still_has_its_user(
    owner: Owner, accepted: Accepted
) -> None:
    client = socket.socket(socket.AF_INET)
    end = accepted(bound(socket.AF_INET, "127.0.0.1"), client)
    client.shutdown(socket.SHUT_WR)
    assert tcp_peer_user(end, owner) == os.geteuid()


@pytest.mark.parametrize("lingers", [True, False])
def test_a_client_that_closed_its_end_is_nobody_and_not_root(
    lingers: bool, owner: Owner, accepted: Accepted
) -> None:
    """The kernel lists what remains of its socket with user 0."""
    client = socket.socket(socket.AF_INET)
    end = accepted(bound(socket.AF_INET, "127.0.0.1"), client)
    if not lingers:  # it is reset, and leaves nothing
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert tcp_peer_user(end, owner) == NOBODY
    assert not is_of_this_user(end.fileno())


@pytest.fixture
def own_address() -> str:
    """An address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.9", 9))  # sends nothing
        except OSError as error:
            pytest.skip(f"this machine has a loopback address only: {error}")
        return str(probe.getsockname()[0])


def test_a_client_with_another_address_of_this_machine_is_no_other_machine(
    own_address: str, owner: Owner, accepted: Accepted
) -> None:
    """It chose that address as the source of its connection to the loopback."""
    end = accepted(bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, own_address))
    assert end.getpeername()[0] == own_address
    assert tcp_peer_user(end, owner) == os.geteuid()
    assert tcp_peer_user(end, lambda *_: SocketOwner(STRANGER, True)) == STRANGER
    assert tcp_peer_user(end, lambda *_: None) == NOBODY  # reset while it was looked up


class FromElsewhere(socket.socket):
    """A connection whose other end is on another machine."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)

    def getpeername(self) -> tuple[str, int]:
        return "203.0.113.9", 40_000

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 9


@pytest.mark.usefixtures("own_address")
def test_a_connection_from_another_machine_has_no_user_here(owner: Owner) -> None:
    with FromElsewhere() as end:
        assert tcp_peer_user(end, owner) is None


def test_a_listening_socket_is_not_taken_for_a_connection() -> None:
    """The kernel answers with it where no connection has the addresses."""
    if not diag_is_available():
        pytest.skip("this kernel does not tell of sockets by netlink")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here: End = (ip_address("127.0.0.1"), listener.getsockname()[1])
        assert diag_owner(here, (here[0], 1)) is None


def test_addresses_are_written_as_the_kernel_lists_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listed = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()]
        assert as_listed(ip_address("127.0.0.1"), port) in listed


QUICK_CONNECTIONS = 300


def test_the_library_of_monarch_accepts_through_the_guard() -> None:
    from monarch import _rust_bindings

    guard_connections()
    guard_connections()  # once is enough, and twice is no more
    (guarded,) = _installed
    library = Path(_rust_bindings.__file__)
    (slot,) = function_slots(library, _address(guarded))
    assert ctypes.c_uint64.from_address(slot).value == _address(guarded)
    assert function_slots(library, _address(_libc().accept4)) == []


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket that does not wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        yield listener


def test_a_stranger_is_closed_and_the_next_of_this_user_is_accepted(
    listener: socket.socket,
) -> None:
    verdicts = iter([False, False, True])
    accept = guarded_accept(_libc().accept4, lambda _: next(verdicts))
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

    accept = guarded_accept(_libc().accept4, fails)
    with socket.create_connection(listener.getsockname(), 5.0) as client:
        assert accept(listener.fileno(), None, None, 0) == -1
        assert client.recv(1) == b""
    assert "a connection was refused: KeyError('no table')" in capsys.readouterr().err


def test_no_quick_connection_of_this_user_is_refused(listener: socket.socket) -> None:
    """As many as wait for `accept` are opened at once, while others are closed."""
    accept = guarded_accept(_libc().accept4)
    for _ in range(QUICK_CONNECTIONS // 20):
        clients = [socket.create_connection(listener.getsockname(), 5.0) for _ in range(20)]
        ends = [socket.socket(fileno=accept(listener.fileno(), None, None, 0)) for _ in clients]
        assert [end.getpeername() for end in ends] == [one.getsockname() for one in clients]
        for one in (*clients, *ends):
            one.close()


def test_a_unix_connection_has_the_user_of_its_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        end, _ = listener.accept()
        with end:
            assert user_of(end.fileno()) == os.geteuid()
            assert is_of_this_user(end.fileno())


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux loads ELF libraries"
)


def loaded_math() -> Path:
    """The library of `math`, which calls the `pow` of libm."""
    if not getattr(math, "__file__", None):
        pytest.skip("math is built into this Python")
    return Path(str(math.__file__))


def own_pow() -> int:
    """The address of libm's `pow`, which a library that calls it holds."""
    return ctypes.cast(ctypes.CDLL("libm.so.6").pow, ctypes.c_void_p).value or 0


def test_a_slot_holds_the_imported_function_until_another_is_written() -> None:
    assert math.pow(2.0, 3.0) == 8.0  # the linker may fill a slot at the first call
    (slot, *_) = function_slots(loaded_math(), own_pow())
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)
    other = double(lambda a, b: a + b)
    try:
        write_slot(slot, ctypes.cast(other, ctypes.c_void_p).value or 0)
        assert math.pow(2.0, 3.0) == 5.0
    finally:
        write_slot(slot, own_pow())
    assert math.pow(2.0, 3.0) == 8.0


def test_a_function_that_is_not_imported_has_no_slot() -> None:
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
    unknown = double(lambda a: a)
    assert function_slots(loaded_math(), ctypes.cast(unknown, ctypes.c_void_p).value or 0) == []


def test_a_library_that_is_not_loaded_has_no_slot(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(loaded_math().read_bytes())
    assert function_slots(library, own_pow()) == []
