"""Reads the owner of a TCP socket from `/proc/net/tcp`, where the kernel cannot be asked for one.

It is a list of all sockets in text: slow where there are many, and a reading may miss one while
others come and go. `socket_diag` is exact.
"""

from __future__ import annotations

import ipaddress
import struct
from itertools import chain
from pathlib import Path

from composer_mesh.mesh.socket_diag import End, Ip, SocketOwner

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
