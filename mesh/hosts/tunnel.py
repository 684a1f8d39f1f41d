"""SSH tunnels between hosts whose ports are all bound to loopback.

The controller's machine runs one ssh to each host. Every worker has the same address on all
machines, 127.0.0.1 and its own port; connections between two hosts pass through the controller's
machine. Builds the commands only; it starts no ssh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
PATIENCE = (
    "BatchMode=yes",  # never prompts for a password
    "ExitOnForwardFailure=yes",  # a port in use ends ssh, instead of a tunnel without it
    "ConnectTimeout=15",
    "ServerAliveInterval=5",  # a broken connection is detected after 15 s
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a shared connection would hold the ports after this ssh has ended
    "ControlPath=none",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
)


class TunnelRefused(ValueError):
    """Hosts that cannot be reached by tunnels: what was found, and the repair."""


@dataclass(frozen=True)
class Tunnel:
    """One ssh process, which runs on the controller's machine during the run."""

    destination: str
    command: tuple[str, ...]


def tunnels(
    destinations: Sequence[str], ports: Sequence[int], controller_port: int, options: Sequence[str]
) -> tuple[Tunnel, ...]:
    """Return the tunnels of hosts, in order; `ports` has one worker port per destination.

    `options` are further arguments of ssh, placed first. Raises `TunnelRefused`.
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
    """Return the command that forwards the host's worker port here, and every other port there."""
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
