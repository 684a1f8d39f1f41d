"""Addresses on which a host may listen: what is refused, and which one a machine has.

Whoever reaches a worker's port runs code there, so only loopback and private addresses pass unless
somebody names more. Nothing here listens.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
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

Ip: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

SCHEMES = ("tls", "tcp")
PRIVATE = tuple(
    ip_network(text)
    # RFC 1918; RFC 6598, which cloud and overlay networks use for pods; RFC 4193
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the default route leads there


class BadAddress(ValueError):
    """An address that is none, or on which no host may listen: the value, the bound, the repair."""


def split(address: str) -> tuple[str, str, int]:
    """Scheme, host and port of an address; an IPv6 host is without its brackets."""
    scheme, there, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    if not (
        there
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
            f"{address!r} is no address of a host: write tls://HOST:PORT or tcp://HOST:PORT with a "
            "port from 0 to 65535, an IPv6 host in brackets, such as tls://10.0.0.5:22300"
        )
    return scheme, plain, int(port)


def join(scheme: str, host: str, port: int) -> str:
    """The address that `split` takes apart."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_listen(address: str, subnets: Sequence[str] = (), any_address: bool = False) -> None:
    """Raise `BadAddress` where a host must not listen; `any_address` lets every one pass.

    A name is looked up, and every address that it has must pass. Without `subnets` private
    addresses pass, with them those inside; loopback, which nobody else reaches, always does.
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
    """An address of this machine on which it may listen, as the host part of an address.

    The one from which it reaches `towards`, a host or an address; without it that of the default
    route, else any that passes, loopback last. Raises `BadAddress` where none passes.
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
    """A port on which nobody listens at that address now; raises `BadAddress` if it is elsewhere's.

    Another program may take it before it is used.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
            return int(listener.getsockname()[1])
    except OSError as error:
        raise BadAddress(
            f"{host} is no address of this machine ({error.strerror}): name one that it has"
        ) from None


def _own_towards(scheme: str, subnets: Sequence[str], towards: str) -> str:
    host = split(towards)[1] if "://" in towards else towards
    for ip in _route_to(host):
        check_listen(join(scheme, str(ip), 0), subnets)
        return str(ip)
    raise BadAddress(f"this machine has no route to {host}: check that name, and the network")


def _why_not(ip: Ip, networks: Sequence[Network]) -> str:
    """Why nobody may listen there; empty where one may."""
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
        raise BadAddress(f"subnet {text!r} is no network ({error}): write 10.0.0.0/8") from None


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
    """The address from which packets to a host leave; nothing is sent. Empty without a route."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            yield _ip(probe.getsockname()[0])
    except OSError:
        return


def _interfaces() -> Iterator[Ip]:
    """Every address of this machine, IPv4 first; those that need a scope are left out."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and not _ip(entry.address).is_link_local:
                yield _ip(entry.address)
