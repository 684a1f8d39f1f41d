"""The user at the other end of a TCP connection of the same machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

from composer_mesh.mesh.socket_diag import End, Ip, SocketOwner, diag_is_available, diag_owner
from composer_mesh.mesh.socket_table import table_owner

NOBODY = -1
"""In place of a user: whoever opened the connection has closed it already."""
Owner: TypeAlias = Callable[[End, End], SocketOwner | None]


def tcp_peer_user(connection: socket.socket, owner: Owner | None = None) -> int | None:
    """Return the user id of the process at the other end; None if it is on another machine.

    The kernel keeps no user of a socket that its process has closed, which is `NOBODY`.
    """
    try:
        there, here = connection.getpeername(), connection.getsockname()
    except OSError:
        return NOBODY
    return user_at(there, here, connection.family, owner)


def user_at(there: Any, here: Any, family: int, owner: Owner | None = None) -> int | None:
    """Return the user of a connection by its two addresses, as `tcp_peer_user` does."""
    find = owner or (diag_owner if diag_is_available() else table_owner)
    found = find(_end(there), _end(here))
    if found is not None:
        return found.user if found.is_open else NOBODY
    return NOBODY if _is_of_this_machine(family, there) else None


def _end(address: Any) -> End:
    return _ip(address[0]), address[1]


def _ip(text: str) -> Ip:
    """Parse an address; an IPv4 one that an IPv6 socket reports becomes IPv4 again."""
    found = ipaddress.ip_address(text.partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _is_of_this_machine(family: int, address: Any) -> bool:
    """Whether an address is one of this machine: then it is also the source of what goes to it."""
    ip = _ip(address[0])
    if ip.is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(address)
        return _ip(probe.getsockname()[0]) == ip
