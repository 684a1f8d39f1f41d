"""Refuses connections of other users to the sockets of Monarch in this process.

Whoever may send messages to a Monarch process can run code in it. On one machine Monarch listens on
abstract Unix sockets, which have no owner and no mode, and its admin server on a loopback port:
every user of the machine can connect to both, and Monarch has no setting against it. So `accept4`,
by which its native library accepts connections, is replaced in that library's table of imported
functions: a connection of another user is closed before Monarch hears of it.

The dynamic linker fills that table (the global offset table) when it loads the library. Only 64-bit
little-endian Linux is known here.

Connections from other machines pass: the run's certificates decide about them
(`hosts.certificates`).

The slots in which a loaded ELF library keeps the addresses of functions that it imports.

The dynamic linker fills these slots (the global offset table) when it loads the library. Knows
64-bit little-endian Linux; nothing here knows what a function does.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.tcp_peer import ROOT_USER, peer_user, tcp_peer_user

LOAD, DYNAMIC = 1, 2
"""Types of program headers."""
STRTAB, SYMTAB, RELA, RELASZ, PLTRELSZ, JMPREL, RELACOUNT = 5, 6, 7, 8, 2, 23, 0x6FFFFFF9
"""Tags of the dynamic section."""
SLOT_TYPES = frozenset({6, 7, 1025, 1026})
"""Relocations that hold a function's address: GLOB_DAT and JUMP_SLOT of x86-64 and aarch64."""
ELF64_LITTLE = b"\x7fELF\x02\x01"
HEADERS_AT, HEADER = 32, struct.Struct("<II6Q")
ENTRY, RELOCATION = struct.Struct("<QQ"), struct.Struct("<QQq")
SYMBOL_SIZE = 24


class UnknownLibrary(RuntimeError):
    """A library cannot be read as a loaded 64-bit ELF library: which, and what it lacks."""


@dataclass(frozen=True)
class _Image:
    """The file of a library and its load segments: (address, size, offset in the file)."""

    data: mmap.mmap
    segments: tuple[tuple[int, int, int], ...]
    dynamic: dict[int, int]

    def offset(self, address: int) -> int:
        """Return where the byte of an address lies in the file."""
        for start, size, offset in self.segments:
            if start <= address < start + size:
                return address - start + offset
        raise UnknownLibrary(f"address {address:#x} is in no segment of its file")

    def name(self, symbol: int) -> bytes:
        """Return the name of a dynamic symbol by its number."""
        at = self.offset(self.dynamic[SYMTAB] + symbol * SYMBOL_SIZE)
        (name,) = struct.unpack_from("<I", self.data, at)
        start = self.offset(self.dynamic[STRTAB] + name)
        return self.data[start : self.data.find(b"\0", start)]


def function_slots(library: Path, function: str) -> Iterator[int]:
    """Yield the addresses in this process where a loaded library keeps an imported function's.

    Raises `UnknownLibrary` if it is not loaded or not 64-bit ELF.
    """
    base = _base(library)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        image = _read(library, data)
        for slot, symbol in _relocations(image):
            if image.name(symbol) == function.encode():
                yield base + slot


def write_slot(slot: int, function: int) -> None:
    """Write a function's address into a slot, whose page the linker may have made read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = slot & -mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), f"the page at {page:#x} cannot be made writable")
    ctypes.c_uint64.from_address(slot).value = function


def _base(library: Path) -> int:
    """Return where the first byte of a library's file is mapped."""
    real = str(library.resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == real and int(fields[2], 16) == 0:
            return int(fields[0].partition("-")[0], 16)
    raise UnknownLibrary(f"{library} is not loaded into this process")


def _read(library: Path, data: mmap.mmap) -> _Image:
    if data[: len(ELF64_LITTLE)] != ELF64_LITTLE:
        raise UnknownLibrary(f"{library} is no 64-bit little-endian ELF library")
    (first,) = struct.unpack_from("<Q", data, HEADERS_AT)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [HEADER.unpack_from(data, first + number * size) for number in range(count)]
    segments = tuple((one[3], one[5], one[2]) for one in headers if one[0] == LOAD)
    dynamic = next((one for one in headers if one[0] == DYNAMIC), None)
    if dynamic is None:
        raise UnknownLibrary(f"{library} imports nothing: it has no dynamic section")
    section = data[dynamic[2] : dynamic[2] + dynamic[5]]
    return _Image(data, segments, dict(ENTRY.iter_unpack(section)))


def _relocations(image: _Image) -> Iterator[tuple[int, int]]:
    """Yield slot and symbol of every imported address; relative ones come first and are skipped."""
    relative = image.dynamic.get(RELACOUNT, 0) * RELOCATION.size
    tables = ((RELA, RELASZ, relative), (JMPREL, PLTRELSZ, 0))
    for start, length, skipped in tables:
        if start not in image.dynamic:
            continue
        at = image.offset(image.dynamic[start])
        table = image.data[at + skipped : at + image.dynamic[length]]
        for slot, about, _ in RELOCATION.iter_unpack(table):
            if about & 0xFFFFFFFF in SLOT_TYPES:
                yield slot, about >> 32


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
        return peer_user(end) if end.family == socket.AF_UNIX else tcp_peer_user(end)
