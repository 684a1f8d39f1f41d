"""Refuses connections of other users to the sockets of Monarch in this process.

Whoever may send messages to a Monarch process can run code in it. On one machine Monarch listens on
abstract Unix sockets, which have no owner and no mode, and its admin server on a loopback port:
every user of the machine can connect to both, and Monarch has no setting against it. So `accept4`,
by which its native library accepts connections, is replaced in that library's table of imported
functions: a connection of another user is closed before Monarch notices it.

The dynamic linker fills that table (the global offset table) when it loads the library. Only 64-bit
Linux is known here.

Connections from other machines pass: the run's certificates decide about them
(`hosts.certificates`).
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from composer_mesh.mesh.tcp_peer import ROOT_USER, peer_user, tcp_peer_user


def function_slots(library: Path, function: int) -> list[int]:
    """Return where a loaded library keeps the address of a function that it imports.

    The slots lie behind the library's code. The linker has filled them when it loaded a library
    that is bound then (BIND_NOW), as Monarch's is. Empty if the library has no such slot.
    """
    real, sought, after_code = str(library.resolve()), struct.pack("=Q", function), False
    found: list[int] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, path = line.split(maxsplit=5)
        if path == real and "x" in rights:
            after_code = True
        elif path == real and after_code and rights.startswith("r"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            memory = ctypes.string_at(start, end - start)
            places = (one.start() for one in re.finditer(re.escape(sought), memory))
            found += [start + place for place in places if place % len(sought) == 0]
    return found


def write_slot(slot: int, function: int) -> None:
    """Write a function's address into a slot, whose page the linker may have made read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = slot & -mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), f"the page at {page:#x} cannot be made writable")
    ctypes.c_uint64.from_address(slot).value = function


SUCCESSOR = "tcgetpgrp"
"""A function of libc that takes a socket and fails: connections are refused while Python ends."""

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

    library, libc = Path(_rust_bindings.__file__), _libc()
    slots = function_slots(library, _address(libc.accept4))
    if not slots:
        raise ConnectionsUnguarded(
            f"{library} accepts connections in an unknown way, so other users of this machine "
            "could run code in this run: install the torchmonarch that pyproject.toml names"
        )
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
        return peer_user(end) if end.family == socket.AF_UNIX else tcp_peer_user(end)
