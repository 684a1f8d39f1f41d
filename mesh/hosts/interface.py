"""The address by which other hosts reach this process's host, and its network interface.

The host's worker passes the address to each process that it starts
(`mesh.process_resources.ADDRESS`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address

import psutil

from composer_mesh.mesh.process_resources import ADDRESS


class NoAddress(RuntimeError):
    """A process that others must reach has no address, or none that they can reach."""


def cluster_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return an IP address of this host that other hosts of the run reach; raises `NoAddress`."""
    told = environ.get(ADDRESS, "")
    if not told:
        raise NoAddress(f"{ADDRESS} is not set, so no other host could reach this process")
    try:
        return str(ip_address(told))
    except ValueError:
        return _looked_up(told)


def _looked_up(name: str) -> str:
    """Resolve a name to an address that is not loopback, as a machine's own name often is."""
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
    """Return the interface of this machine that has an IP address; raises `NoAddress`."""
    wanted = ip_address(address)
    if wanted.version == 4 and wanted.is_loopback:
        return "lo"  # which has all of 127.0.0.0/8
    for label, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == str(wanted) for one in found):
            return label.partition(":")[0]  # "eth0:1" is a second address of eth0
    raise NoAddress(f"no network interface of this machine has the address {address}")
