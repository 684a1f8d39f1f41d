"""The slots in which a loaded ELF library keeps the addresses of functions that it imports.

The dynamic linker fills these slots (the global offset table) when it loads the library. Knows
64-bit little-endian Linux; nothing here knows what a function does.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
