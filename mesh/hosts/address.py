"""Listen addresses of hosts: which are refused, and which one a machine uses.

A worker is attached by its process address, `IDENTITY@SCHEME://HOST:PORT`. The identity follows
from host and port unless it is given, so that both ends know it from `tls://10.0.0.5:22300`.

Access to a worker's port allows code execution, so only loopback and private addresses are accepted
unless the user allows more.

The address by which other hosts reach this process's host, and its network interface.

The host's worker passes the address to each process that it starts
(`mesh.process_resources.ADDRESS`).
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

import psutil

from composer_mesh.mesh.process_resources import ADDRESS


class NoAddress(RuntimeError):
    """A process that others must reach has no address, or none that they can reach."""


IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface of traffic between ranks."""


def cluster_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return an IP address of this host that other hosts of the run reach; raises `NoAddress`."""
    given = environ.get(ADDRESS, "")
    if not given:
        raise NoAddress(f"{ADDRESS} is not set, so no other host could reach this process")
    try:
        return str(ip_address(given))
    except ValueError:
        return _looked_up(given)


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


Ip: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

SCHEMES = ("tls", "tcp")
BASE58 = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
IDENTITY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]*<[{BASE58}]{{1,11}}>")
"""Identity of a process in Monarch: a label, and 64 bits in base 58."""
PRIVATE = tuple(
    ip_network(text)
    # RFC 1918; RFC 6598, which cloud and overlay networks use for pods; RFC 4193
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
ELSEWHERE = "192.0.2.1"  # RFC 5737, assigned to no host, so routed by default


class BadAddress(ValueError):
    """Invalid address, or one that a host may not listen on: the value, the bound, the repair."""


def split(address: str) -> tuple[str, str, int]:
    """Split an address into scheme, host and port; an IPv6 host is without its brackets.

    The identity of a process address is left out.
    """
    identity, at, channel = address.rpartition("@")
    scheme, there, rest = channel.partition("://")
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    if not (
        bool(IDENTITY.fullmatch(identity)) == bool(at)
        and there
        and colon
        and scheme in SCHEMES
        and plain
        and not set(plain) & set("[]@/*, ")
        and bracketed == (":" in plain)
        and port.isdecimal()
        and port.isascii()
        and int(port) <= 65535
    ):
        raise BadAddress(
            f"{address!r} is not an address of a host: write tls://HOST:PORT or tcp://HOST:PORT "
            "with a port from 0 to 65535, an IPv6 host in brackets, such as tls://10.0.0.5:22300"
        )
    return scheme, plain, int(port)


def join(scheme: str, host: str, port: int) -> str:
    """Join scheme, host and port into an address; the inverse of `split`."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def channel_of(address: str) -> str:
    """Return an address without the identity of its process."""
    return address.rpartition("@")[2]


def process_address(address: str) -> str:
    """Return the address of the process that serves there, such as `service<2M>@tls://gpu-0:22300`.

    One that has an identity is returned unchanged. Raises `BadAddress`.
    """
    _, host, port = split(address)
    if "@" in address:
        return address
    number = int.from_bytes(hashlib.sha256(f"{host}:{port}".encode()).digest()[:8])
    return f"service<{_base58(number)}>@{address}"


def _base58(number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, len(BASE58))
        digits = BASE58[digit] + digits
    return digits


def check_listen(address: str, subnets: Sequence[str] = (), any_address: bool = False) -> None:
    """Raise `BadAddress` if a host must not listen there; `any_address` allows all.

    A name is resolved, and all its addresses must be allowed: private ones, or with `subnets` those
    inside of them. Loopback is always allowed, since other hosts cannot reach it.
    """
    _, host, _ = split(address)
    networks = [_network(subnet) for subnet in subnets]
    if any_address:
        return
    for ip in _addresses(address, host):
        if why := _why_not(ip, networks):
            named = "" if str(ip) == host else f", where {host} leads,"
            raise BadAddress(f"{address} cannot be listened on: {ip}{named} {why}")


def own_address(scheme: str, subnets: Sequence[str] = (), towards: str | None = None) -> str:
    """Return an address of this machine that it may listen on, as the host part of an address.

    It is the one used to reach `towards`, a host or an address; by default that of the default
    route, else any allowed one, loopback last. Raises `BadAddress` if none is allowed.
    """
    if scheme not in SCHEMES:
        raise BadAddress(f"scheme is {scheme!r} but must be one of {', '.join(SCHEMES)}")
    if towards is not None:
        return _own_towards(scheme, subnets, towards)
    networks = [_network(subnet) for subnet in subnets]
    found = [*_route_to(ELSEWHERE), *_interfaces()]
    passing = [ip for ip in found if not _why_not(ip, networks)]
    for ip in sorted(passing, key=lambda ip: ip.is_loopback):
        if subnets and ip.is_loopback:
            break
        return str(ip)
    bound = f"in {', '.join(subnets)}" if subnets else "that is private"
    has = ", ".join(sorted({str(ip) for ip in found if not ip.is_loopback})) or "loopback alone"
    raise BadAddress(
        f"this machine has no address {bound}, it has {has}: name the network of its hosts with "
        "--subnet (cluster.subnets), or the address itself with --listen"
    )


def free_port(host: str) -> int:
    """Return a port that is unused at that address; raises `BadAddress` for other hosts' addresses.

    Another program may take it before it is used.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
            return int(listener.getsockname()[1])
    except OSError as error:
        raise BadAddress(
            f"{host} is not an address of this machine ({error.strerror}): name one that it has"
        ) from None


def _own_towards(scheme: str, subnets: Sequence[str], towards: str) -> str:
    host = split(towards)[1] if "://" in towards else towards
    for ip in _route_to(host):
        check_listen(join(scheme, str(ip), 0), subnets)
        return str(ip)
    raise BadAddress(f"this machine has no route to {host}: check that name, and the network")


def _why_not(ip: Ip, networks: Sequence[Network]) -> str:
    """Return why an IP may not be listened on; empty if it may."""
    ip = ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip
    if ip.is_unspecified:
        return (
            "is every address of the machine, public ones too, and whoever reaches the port runs "
            "code here: name one address of this machine, or auto, or pass --any-address"
        )
    if ip.is_loopback or any(ip in network for network in networks):
        return ""
    if networks:
        named = ", ".join(map(str, networks))
        return f"is not in {named}: name an address that is, or widen --subnet (cluster.subnets)"
    if any(ip in network for network in PRIVATE):
        return ""
    return (
        "is not private, and whoever reaches the port runs code here: name a private address, "
        "allow this network with --subnet (cluster.subnets), or pass --any-address"
    )


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise BadAddress(f"subnet {text!r} is not a network ({error}): write 10.0.0.0/8") from None


def _addresses(address: str, host: str) -> list[Ip]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadAddress(
            f"{address} has a host that cannot be looked up ({error.strerror}): "
            "name it by its IP address"
        ) from None
    return [_ip(str(entry[4][0])) for entry in found]


def _ip(text: str) -> Ip:
    return ip_address(text.partition("%")[0])


def _route_to(host: str) -> Iterator[Ip]:
    """Yield the source address for packets to a host, without sending any; none without a route."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            yield _ip(probe.getsockname()[0])
    except OSError:
        return


def _interfaces() -> Iterator[Ip]:
    """Yield this machine's addresses, IPv4 first, except those that need a scope."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and not _ip(entry.address).is_link_local:
                yield _ip(entry.address)
