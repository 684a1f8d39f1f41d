"""The user at the other end of a TCP connection of this machine is the one the kernel names."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from composer_mesh.mesh.connection_guard import is_of_this_user
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
