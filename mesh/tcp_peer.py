"""The user at the other end of a TCP connection of the same machine.

Reads the owner of a TCP socket from `/proc/net/tcp`, where the kernel cannot be queried for one.

It is a list of all sockets in text: slow where there are many, and a reading may miss one while
others come and go. `socket_diag` is exact.

Asks the kernel for one TCP socket of this machine, by both its addresses (NETLINK_SOCK_DIAG).

One request of some microseconds, whatever the number of sockets. Structures are those of Linux's
`linux/inet_diag.h` and `linux/netlink.h`; `man 7 sock_diag` describes them.

The user of the process at the other end of a Unix socket.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

ROOT_USER = 0
CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of Linux: pid, uid, gid."""


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that opened the other end, or listens there."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    return peer_user(connection) in (os.geteuid(), ROOT_USER)


Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
End: TypeAlias = tuple[Ip, int]
"""Address and port of one end of a connection."""

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLM_F_REQUEST = 20, 2, 1
ALL_STATES, NO_COOKIE, ANY_DEVICE = 0xFFFFFFFF, 0xFFFFFFFF, 0
KERNEL, MOST_REPLY = 0, 8192

HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence, port."""
REQUEST = struct.Struct("=BBBxI")
"""`struct inet_diag_req_v2` before its socket: family, protocol, extensions, states."""
PORTS, COOKIES = struct.Struct("!HH"), struct.Struct("=III")
REPLY = struct.Struct("=4x4s32x12x12xII")
"""`struct inet_diag_msg`: the two ports; the user and the inode."""

_UNSUPPORTED = frozenset(
    {
        errno.EPROTONOSUPPORT,
        errno.EAFNOSUPPORT,
        errno.EOPNOTSUPP,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
    }
)
"""Errors about a socket that exists, by kernels and sandboxes that do not tell of sockets."""


@dataclass(frozen=True)
class SocketOwner:
    """User of a socket, and whether a process still has it open; what is closed is listed as
    root's."""

    user: int
    is_open: bool


@cache
def diag_is_available() -> bool:
    """Whether the kernel answers here: not in gVisor, nor where a sandbox forbids netlink."""
    with socket.create_server(("127.0.0.1", 0)) as known:
        here = (ipaddress.ip_address("127.0.0.1"), known.getsockname()[1])
        try:
            _diag_message(here, here)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
    return True


def diag_owner(local: End, remote: End) -> SocketOwner | None:
    """Return the owner of the TCP socket with these addresses; None if this machine has none."""
    try:
        ports, user, inode = REPLY.unpack_from(_diag_message(local, remote))
    except FileNotFoundError:
        return None
    if ports != PORTS.pack(local[1], remote[1]):  # the socket that listens at the local address
        return None
    return SocketOwner(user, inode != 0)


def _diag_message(local: End, remote: End) -> bytes:
    """Return the kernel's `inet_diag_msg`; raises OSError, FileNotFoundError if it has none."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    body = (
        REQUEST.pack(family, socket.IPPROTO_TCP, 0, ALL_STATES)
        + PORTS.pack(local[1], remote[1])
        + local[0].packed.ljust(16, b"\0")
        + remote[0].packed.ljust(16, b"\0")
        + COOKIES.pack(ANY_DEVICE, NO_COOKIE, NO_COOKIE)
    )
    head = HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.sendto(head + body, (KERNEL, 0))
        # The kernel has replied when the sending returns.
        reply, (sender, _) = kernel.recvfrom(MOST_REPLY, socket.MSG_DONTWAIT)
    if sender != KERNEL:
        raise PermissionError(f"process {sender} replied in place of the kernel")
    if HEADER.unpack_from(reply)[1] == NLMSG_ERROR:
        (negative,) = struct.unpack_from("=i", reply, HEADER.size)
        raise OSError(-negative, os.strerror(-negative))
    return reply[HEADER.size :]


TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
READINGS = 4


def table_owner(local: End, remote: End) -> SocketOwner | None:
    """Return the owner of the TCP socket with these addresses; None if several readings miss it."""
    sought = set(zip(_forms(*local), _forms(*remote), strict=True))
    for _ in range(READINGS):
        for line in chain.from_iterable(map(_lines, TABLES)):
            fields = line.split()
            if (fields[1], fields[2]) in sought:
                return SocketOwner(int(fields[7]), int(fields[9]) != 0)
    return None


def as_listed(address: Ip, port: int) -> str:
    """Write an address as in `/proc/net/tcp`: words of 32 bits in this machine's byte order."""
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _forms(address: Ip, port: int) -> tuple[str, str]:
    """Write an address both as IPv4 and IPv6 sockets have it; a real IPv6 one has one form."""
    if isinstance(address, ipaddress.IPv6Address):
        return as_listed(address, port), as_listed(address, port)
    mapped = ipaddress.IPv6Address(b"\0" * 10 + b"\xff" * 2 + address.packed)
    return as_listed(address, port), as_listed(mapped, port)


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except FileNotFoundError:  # a kernel without IPv6
        return []


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
