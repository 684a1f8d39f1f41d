"""Asks the kernel for one TCP socket of this machine, by both its addresses (NETLINK_SOCK_DIAG).

One request of some microseconds, whatever the number of sockets. Structures are those of Linux's
`linux/inet_diag.h` and `linux/netlink.h`; `man 7 sock_diag` describes them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

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
            _asked(here, here)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
    return True


def diag_owner(local: End, remote: End) -> SocketOwner | None:
    """Return the owner of the TCP socket with these addresses; None if this machine has none."""
    try:
        ports, user, inode = REPLY.unpack_from(_asked(local, remote))
    except FileNotFoundError:
        return None
    if ports != PORTS.pack(local[1], remote[1]):  # the socket that listens at the local address
        return None
    return SocketOwner(user, inode != 0)


def _asked(local: End, remote: End) -> bytes:
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
