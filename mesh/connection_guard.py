"""Refuses connections of other users to the sockets of Monarch in this process.

Whoever may send messages to a Monarch process can run code in it. On one machine Monarch listens on
abstract Unix sockets, which have no owner and no mode, and its admin server on a loopback port:
every user of the machine can connect to both, and Monarch has no setting against it. So `accept4`,
by which its native library accepts connections, is replaced in that library's table of imported
functions: a connection of another user is closed before Monarch hears of it.

Connections from other machines pass: the run's certificates decide about them
(`hosts.certificates`).
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from composer_mesh.mesh.imported_functions import function_slots, write_slot
from composer_mesh.mesh.peer_user import ROOT_USER, peer_user

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

SUCCESSOR = "tcgetpgrp"
"""A function of libc that takes a socket and fails: connections are refused while Python ends."""
NOBODY = -1
ESTABLISHED = "01"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
READINGS, AGAIN_S = 4, 0.01

ARGUMENTS = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
"""Of `accept4`: the listening socket, where to write the peer's address and its length, flags."""
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS, use_errno=True)
_installed: list[object] = []
_one_at_a_time = threading.Lock()


class ConnectionsUnguarded(RuntimeError):
    """Monarch's sockets would be open to other users: why, and the repair."""


def guard_connections() -> None:
    """Refuse other users' connections to Monarch in this process, from before it listens.

    Only Linux has abstract sockets. Raises `ConnectionsUnguarded`.
    """
    if not sys.platform.startswith("linux"):
        return
    with _one_at_a_time:
        if not _installed:
            _install()


def _install() -> None:
    from monarch import _rust_bindings  # imported lazily: it takes a second

    library = Path(_rust_bindings.__file__)
    slots = list(function_slots(library, "accept4"))
    if not slots:
        raise ConnectionsUnguarded(
            f"{library} accepts connections in an unknown way, so other users of this machine "
            "could run code in this run: install the torchmonarch that pyproject.toml names"
        )
    libc = _libc()
    guarded = _Accept(guarded_accept(libc.accept4))
    _installed.append(guarded)
    for slot in slots:
        write_slot(slot, _address(guarded))
    atexit.register(_refuse_all, slots, _address(getattr(libc, SUCCESSOR)))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.accept4.argtypes = ARGUMENTS
    return libc


def _refuse_all(slots: list[int], successor: int) -> None:
    """Accept nothing from here on: no Python function may be called while Python ends."""
    for slot in slots:
        write_slot(slot, successor)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def guarded_accept(
    accept4: Callable[..., int], admits: Callable[[int], bool] | None = None
) -> Callable[..., int]:
    """Return an `accept4` that closes connections that are not admitted, and takes the next."""
    decide = admits or is_of_this_user

    def accept(listener: int, address: int | None, length: int | None, flags: int) -> int:
        """Accept the next connection of this user; native code calls it, from any thread."""
        try:
            while (connection := accept4(listener, address, length, flags)) >= 0:
                if _admitted(connection, decide):
                    break
        except BaseException as error:  # noqa: BLE001  one that left here would count as success
            sys.stderr.write(f"composer-mesh: a connection was refused: {error!r}\n")
            ctypes.set_errno(errno.ECONNABORTED)
            return -1
        return connection

    return accept


def _admitted(connection: int, decide: Callable[[int], bool]) -> bool:
    """Whether a new connection stays open; closes it if not."""
    own = False
    try:
        own = decide(connection)
    finally:
        if not own:
            os.close(connection)
    return own


def is_of_this_user(connection: int) -> bool:
    """Whether a connection comes from this user, from root, or from another machine."""
    user = user_of(connection)
    return user is None or user in (os.geteuid(), ROOT_USER)


def user_of(connection: int) -> int | None:
    """Return the user id of the process that opened a connection; None if on another machine.

    It is `NOBODY` if that process has closed the connection already.
    """
    with socket.socket(fileno=os.dup(connection)) as end:
        if end.family == socket.AF_UNIX:
            return peer_user(end)
        try:
            there, here = end.getpeername(), end.getsockname()
        except OSError:
            return NOBODY
    there_ip, here_ip = _ip(there[0]), _ip(here[0])
    if there_ip != here_ip and not there_ip.is_loopback:
        return None
    return _owner((there_ip, there[1]), (here_ip, here[1]))


def _ip(text: str) -> Ip:
    """Parse an address; an IPv4 one that an IPv6 socket reports becomes IPv4 again."""
    found = ipaddress.ip_address(text.partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def as_listed(address: Ip, port: int) -> str:
    """Write an address as in `/proc/net/tcp`: words of 32 bits in this machine's byte order."""
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _owner(local: tuple[Ip, int], remote: tuple[Ip, int]) -> int:
    """Return the owner of an open TCP socket of this machine by both its addresses.

    The kernel lists a socket that its process has closed as root's, without an inode. A reading may
    miss a socket while others come and go, so a socket is missing only if several miss it.
    """
    sought = set(zip(_forms(*local), _forms(*remote), strict=True))
    for attempt in range(READINGS):
        time.sleep(attempt * AGAIN_S)
        for line in chain.from_iterable(map(_lines, TABLES)):
            fields = line.split()
            if (fields[1], fields[2]) in sought and fields[3] == ESTABLISHED and int(fields[9]):
                return int(fields[7])
    return NOBODY


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
