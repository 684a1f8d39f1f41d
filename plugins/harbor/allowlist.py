"""Which hosts an allowlist names, and which addresses may be connected to for them.

Data and decisions only. Names are compared before anything is resolved, so that no query about an
unlisted name leaves this machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

PORTS = (80, 443)
NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
ANY = "*."
TRANSLATED = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"))
"""IPv6 addresses that a gateway translates to IPv4 ones, private ones included."""
HOST_SERVICE = ip_address("168.63.129.16")
"""A public address at which the hosts of one cloud serve their own virtual machines."""
Address = IPv4Address | IPv6Address


class NotAllowed(Exception):
    """A host or port that is not listed, or an address that is not reached by a name."""


@dataclass(frozen=True)
class Allowlist:
    """Names, names below others, and networks."""

    names: frozenset[str]
    suffixes: tuple[str, ...]
    networks: tuple[IPv4Network | IPv6Network, ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Self:
        """Return the list of entries such as `a.org`, `*.a.org`, `10.0.0.7` and `10.0.0.0/8`.

        `*.a.org` are the names below `a.org`, not that itself. Raises ValueError with the entry.
        """
        names, suffixes, networks = set(), [], []
        for entry in hosts:
            host = entry.strip().lower().rstrip(".")
            try:
                networks.append(ip_network(host))
                continue
            except ValueError:
                below = host.startswith(ANY)
            name = host.removeprefix(ANY)
            if not NAME.fullmatch(name) or is_number(name):
                raise ValueError(
                    f"allowed_hosts has {entry[:80]!r}: write a name, '*.' and a name, an IP "
                    "address or a CIDR range, without scheme, port and path"
                )
            if below:
                suffixes.append(f".{name}")
            else:
                names.add(name)
        return cls(frozenset(names), tuple(suffixes), tuple(networks))

    def checked(self, host: str, port: int) -> Address | str:
        """Return a host as an address, or as a name that is to be resolved; raises NotAllowed."""
        if port not in PORTS:
            raise NotAllowed(f"port {port} is not reached: ports are {PORTS[0]} and {PORTS[1]}")
        if (address := address_of(host)) is not None:
            if not self._lists(address):
                raise NotAllowed(f"{host[:80]} is not in allowed_hosts")
            return address
        name = host.lower().rstrip(".")
        listed = name in self.names or any(name.endswith(one) for one in self.suffixes)
        if not listed or not NAME.fullmatch(name):
            raise NotAllowed(f"{host[:80]} is not in allowed_hosts")
        return name

    def reached(self, name: str, found: Sequence[str]) -> list[Address]:
        """Return the addresses of a name; raises NotAllowed where one of them is no public one.

        A private address is reached where the list has it, or its network.
        """
        addresses = [one for text in found if (one := address_of(text)) is not None]
        for one in addresses:
            if not is_public(one) and not self._lists(one):
                raise NotAllowed(f"{name[:80]} is at {one}, no public address: list that, too")
        return addresses

    def _lists(self, address: Address) -> bool:
        return any(address in one for one in self.networks)


def address_of(text: str) -> Address | None:
    """Return an address, that of IPv4 where one of IPv6 only maps it; None for what is none."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    if isinstance(found, IPv6Address):
        return None if found.scope_id else found.ipv4_mapped or found
    return found


def is_public(address: Address) -> bool:
    """Whether an address is one of the public Internet, and of nothing near this machine."""
    if not address.is_global or address.is_multicast or address == HOST_SERVICE:
        return False
    if isinstance(address, IPv4Address):
        return True
    inner = address.sixtofour or (address.teredo or (None,))[0]
    if inner is not None or address.is_site_local or address.is_reserved:
        return False  # reserved are also those that have an IPv4 address as their end
    return all(address not in t for t in TRANSLATED)


def is_number(name: str) -> bool:
    """Whether a name ends like an IPv4 address, which some resolvers read as one."""
    return re.fullmatch(r"\d+|0x[0-9a-f]*", name.rpartition(".")[2]) is not None
