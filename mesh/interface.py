"""The address by which other hosts reach this process's host, and the interface that has it.

The host's worker tells the address to every process that it starts (`mesh.share.ADDRESS`).
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from composer_mesh.mesh.share import ADDRESS

SIOCGIFCONF = 0x8912
ENTRY, MOST = 40, 256
"""Bytes of one `struct ifreq` of a 64-bit kernel, and how many are asked for."""
OF_IPV6 = Path("/proc/net/if_inet6")


class NoAddress(RuntimeError):
    """A process that others must reach was not told by which address, or by none that they can."""


def cluster_address(environ: Mapping[str, str] = os.environ) -> str:
    """An IP address of this host that the other hosts of the run reach; raises `NoAddress`."""
    told = environ.get(ADDRESS, "")
    if not told:
        raise NoAddress(f"{ADDRESS} is not set, so no other host could reach this process")
    try:
        return str(ip_address(told))
    except ValueError:
        return _looked_up(told)


def _looked_up(name: str) -> str:
    """What a name means here, which is often loopback for a machine's own."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NoAddress(
            f"{ADDRESS} is {name}, which cannot be looked up here ({error.strerror}): name this "
            "host by its IP address"
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    reached = [one for one in addresses if not ip_address(one.partition("%")[0]).is_loopback]
    if not reached:
        raise NoAddress(
            f"{ADDRESS} is {name}, which is {addresses[0]} here, and no other host reaches that: "
            "name this host by its IP address"
        )
    return reached[0]


def interface_of(address: str) -> str:
    """The name of the interface of this machine that has an IP address; raises `NoAddress`."""
    wanted = ip_address(address)
    if wanted.version == 4 and wanted.is_loopback:
        return "lo"  # which has all of 127.0.0.0/8
    for name, packed in _of_ipv6() if wanted.version == 6 else _of_ipv4():
        if packed == wanted.packed:
            return name
    raise NoAddress(f"no network interface of this machine has the address {address}")


def _of_ipv4() -> Iterator[tuple[str, bytes]]:
    entries = array.array("B", bytes(ENTRY * MOST))
    place, size = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", size, place)
        length = struct.unpack("iL", fcntl.ioctl(any_socket, SIOCGIFCONF, asked))[0]
    for begin in range(0, length, ENTRY):
        entry = entries[begin : begin + ENTRY].tobytes()
        label = entry[:16].partition(b"\0")[0].decode()
        yield label.partition(":")[0], entry[20:24]  # "eth0:1" is a second address of eth0


def _of_ipv6() -> Iterator[tuple[str, bytes]]:
    for line in OF_IPV6.read_text().splitlines() if OF_IPV6.exists() else ():
        address, *_, name = line.split()
        yield name, bytes.fromhex(address)
