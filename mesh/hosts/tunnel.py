"""The ssh tunnels through which hosts reach each other where every port is on loopback.

The machine of the controller holds one ssh to each host. Every worker has the same address,
127.0.0.1 and a port of its own, on all machines; a connection between two hosts passes through the
controller's machine. Nothing here starts ssh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
PATIENCE = (
    "BatchMode=yes",  # asks nobody for a password
    "ExitOnForwardFailure=yes",  # a port that is taken ends it, instead of a tunnel without it
    "ConnectTimeout=15",
    "ServerAliveInterval=5",  # a line that is cut is noticed after 15 s
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a shared connection would keep the ports when this ssh has ended
    "ControlPath=none",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
)


class TunnelRefused(ValueError):
    """Hosts that cannot be reached so: what was found, and the repair."""


@dataclass(frozen=True)
class Tunnel:
    """One ssh, which runs on the controller's machine for as long as the run."""

    destination: str
    command: tuple[str, ...]


def tunnels(
    destinations: Sequence[str], ports: Sequence[int], controller_port: int, options: Sequence[str]
) -> tuple[Tunnel, ...]:
    """The tunnels between hosts, in their order; one worker's port for each destination.

    `options` are further arguments of ssh, before ours. Raises `TunnelRefused`.
    """
    _check(destinations, [*ports, controller_port])
    return tuple(
        Tunnel(
            destination, _ssh(destination, port, [*_others(ports, port), controller_port], options)
        )
        for destination, port in zip(destinations, ports, strict=True)
    )


def _others(ports: Sequence[int], own: int) -> Iterator[int]:
    return (port for port in ports if port != own)


def _ssh(
    destination: str, port: int, back: Sequence[int], options: Sequence[str]
) -> tuple[str, ...]:
    """Its worker's port comes to the controller's machine, every other port goes there."""
    patience = [part for option in PATIENCE for part in ("-o", option)]
    forwards = ["-L", _forward(port)]
    for other in back:
        forwards += ["-R", _forward(other)]
    return ("ssh", "-N", "-T", *options, *patience, *forwards, "--", destination)


def _forward(port: int) -> str:
    return f"{LOOPBACK}:{port}:{LOOPBACK}:{port}"


def _check(destinations: Sequence[str], ports: Sequence[int]) -> None:
    for destination in destinations:
        if destinations.count(destination) > 1:
            raise TunnelRefused(
                f"{destination} is the destination of {destinations.count(destination)} hosts, and "
                "one tunnel would take the ports of the other: describe one host for each machine"
            )
    for port in ports:
        if not 1 <= port <= 65535:
            raise TunnelRefused(
                f"port {port} cannot be tunnelled: write a fixed one from 1 to 65535 in "
                "cluster.workers and cluster.address"
            )
        if ports.count(port) > 1:
            raise TunnelRefused(
                f"port {port} is there {ports.count(port)} times, and through tunnels all workers "
                f"and the controller have one address, {LOOPBACK}: give each a port of its own in "
                "cluster.workers and cluster.address, such as 22301, 22302 and so on"
            )
