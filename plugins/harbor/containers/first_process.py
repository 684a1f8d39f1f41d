"""The first process of a container: an ELF program of some 200 bytes that does nothing.

An image need not have a program that lives on, so this one is written here. It reports by one byte
on its standard output, ignores SIGCHLD, so that the kernel reaps whatever is left to it, and
pauses. As process 1 of its namespace it has no handlers, so no signal of the container reaches it.
"""

from __future__ import annotations

import platform
import struct

READY = b"r"
BASE = 0x400000
HEADERS = 64 + 56
SIGCHLD, SIG_IGN = 17, 1
IGNORE = struct.pack("<QQQQ", SIG_IGN, 0, 0, 0)
"""The kernel's `struct sigaction`."""
X86_64, AARCH64 = 62, 183
"""Numbers of machines in ELF."""


def program(machine: str = "") -> bytes:
    """Return the program for a machine, this one by default; raises NotImplementedError."""
    machine = machine or platform.machine()
    if machine == "x86_64":
        return _elf(X86_64, _x86_64(_length(_x86_64)))
    if machine == "aarch64":
        return _elf(AARCH64, _aarch64(_length(_aarch64)))
    raise NotImplementedError(f"containers of bubblewrap run on x86_64 and aarch64, not {machine}")


def _length(code: object) -> int:
    return len(code(0))  # type: ignore[operator]


def _x86_64(size: int) -> bytes:
    """Return the instructions, which `size` bytes later are followed by their data."""
    code = bytearray()

    def call(number: int, *loads: bytes) -> None:
        code.extend(b"\xb8" + struct.pack("<I", number))  # mov eax, number
        for one in loads:
            code.extend(one)
        code.extend(b"\x0f\x05")  # syscall

    def lea_rsi(target: int, at: int) -> bytes:
        return b"\x48\x8d\x35" + struct.pack("<i", target - at - 7)

    signal = b"\xbf" + struct.pack("<I", SIGCHLD)  # mov edi, SIGCHLD
    no_old, set_size = b"\x31\xd2", b"\x41\xba\x08\0\0\0"  # xor edx, edx; mov r10d, 8
    call(13, signal, lea_rsi(size, len(code) + 10), no_old, set_size)  # rt_sigaction
    stdout, one_byte = b"\xbf\x01\0\0\0", b"\xba\x01\0\0\0"  # mov edi, 1; mov edx, 1
    call(1, stdout, lea_rsi(size + len(IGNORE), len(code) + 10), one_byte)  # write
    call(34)  # pause
    code.extend(b"\xeb\xf7")  # jump back to it
    return bytes(code)


def _aarch64(size: int) -> bytes:
    """Return the instructions, which `size` bytes later are followed by their data."""
    code: list[int] = []

    def mov(register: int, number: int) -> None:
        code.append(0xD2800000 | number << 5 | register)  # movz

    def adr(register: int, target: int) -> None:
        distance = target - 4 * len(code)
        code.append(0x10000000 | (distance & 3) << 29 | (distance >> 2 & 0x7FFFF) << 5 | register)

    def call(number: int) -> None:
        mov(8, number)
        code.append(0xD4000001)  # svc 0

    mov(0, SIGCHLD)
    adr(1, size)
    mov(2, 0)
    mov(3, 8)
    call(134)  # rt_sigaction
    mov(0, 1)
    adr(1, size + len(IGNORE))
    mov(2, 1)
    call(64)  # write
    for register in range(4):
        mov(register, 0)
    call(73)  # ppoll of nothing
    code.append(0x17FFFFFA)  # branch back by six instructions, to where registers are cleared
    return struct.pack(f"<{len(code)}I", *code)


def _elf(machine: int, code: bytes) -> bytes:
    """Return a static executable whose one segment is all of it."""
    content = code + IGNORE + READY
    size, entry = HEADERS + len(content), BASE + HEADERS
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 2, machine, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, BASE, BASE, size, size, 0x10000)
    return head + segment + content
