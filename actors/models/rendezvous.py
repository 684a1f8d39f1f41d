"""Rendezvous of a trainer's ranks, and the network interface that they use.

    on the controller's machine   a file that only this user can read
    on another host               a TCP port of rank 0 on loopback
    on several hosts              a TCP port of rank 0, on its host's cluster address

Torch's TCP store requires no token, and messages between ranks are not encrypted. So it is bound to
that one address, and the network between the hosts of a run must be private.
"""

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from composer_mesh.mesh.hosts.interface import cluster_address, interface_of

LOOPBACK = "127.0.0.1"
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Address:
    """The address of rank 0's port."""

    host: str
    port: int


Meeting = Path | Address


def open_store(deadline_s: float, apart: bool = True) -> tuple[Address, dist.Store]:
    """Listen for the other ranks on a free port, on the cluster address if `apart`, or loopback."""
    host = cluster_address() if apart else LOOPBACK
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Address(host, port), store


def join_store(rendezvous: Meeting, size: int, deadline_s: float) -> dist.Store:
    """Return the store in which `size` ranks find each other. Waits for rank 0's port."""
    timeout = timedelta(seconds=deadline_s)
    if isinstance(rendezvous, Address):
        return dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    store = dist.FileStore(str(rendezvous), size)
    store.set_timeout(timeout)
    return store


def talk_over(rendezvous: Meeting, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and NCCL use loopback, or the interface that other hosts can reach."""
    if isinstance(rendezvous, Address):
        near = ipaddress.ip_address(rendezvous.host).is_loopback
        name = interface_of(rendezvous.host if near else cluster_address(environ))
        environ.update(dict.fromkeys(IFNAMES, name))
