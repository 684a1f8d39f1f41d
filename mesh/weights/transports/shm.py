"""Weights in anonymous shared memory of one host, which leaves nothing behind.

The publisher creates an anonymous file of both buffers and offers its pid and descriptor, with
which processes of the same user open it. The kernel frees it with the last process that has it
mapped, however that ends. A receiver maps it once, read-only, and copies.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import sys
import warnings
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_mesh.mesh.machine import this_host
from composer_mesh.mesh.weights.manifest import PublisherGone, TransportUnavailable
from composer_mesh.mesh.weights.transports.port import MARK_BYTES, SLOTS, PartShape

NAME = "composer-mesh-weights"
ELSEWHERE = "set weights.transport to rdma"


@dataclass(frozen=True)
class SharedFile:
    """The location of an anonymous file, and its identity."""

    host: str
    pid: int
    descriptor: int
    device: int
    inode: int
    nbytes: int

    def __str__(self) -> str:
        return f"process {self.pid}"


@dataclass(frozen=True)
class ShmOffer:
    """A part's position in a shared file."""

    file: SharedFile
    offset: int


def why_not() -> str | None:
    """Return why this machine does not support the transport; None if it does."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no anonymous shared files"
    return None


class ShmSender:
    """Both buffers of a publisher in one anonymous file, which cannot shrink under a reader."""

    def __init__(self, nbytes: int) -> None:
        if (why := why_not()) is not None:
            raise TransportUnavailable("shm", why, ELSEWHERE)
        self._nbytes = nbytes
        self._slot_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._release = weakref.finalize(self, os.close, descriptor)
        os.fchmod(descriptor, 0o600)
        size = SLOTS * self._slot_bytes
        _allocate(descriptor, size)
        memfd_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, memfd_seals)
        found = os.fstat(descriptor)
        self._file = SharedFile(
            this_host(), os.getpid(), descriptor, found.st_dev, found.st_ino, size
        )
        self._memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def memory(self, slot: int) -> Tensor:
        begin = slot * self._slot_bytes
        return self._memory[begin : begin + self._nbytes]

    async def offer(self, slot: int) -> ShmOffer:
        return ShmOffer(self._file, slot * self._slot_bytes)

    async def close(self) -> None:
        self._release()
        self._memory = torch.empty(0, dtype=torch.uint8)


def _allocate(descriptor: int, size: int) -> None:
    """Allocate all of an anonymous file, so that no write to its memory ends in SIGBUS later."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        why = f"{size} bytes of shared memory cannot be allocated ({error.strerror})"
        repair = "free memory, or set weights.transport to disk"
        raise TransportUnavailable("shm", why, repair) from None


class ShmReceiver:
    """Maps the files of the publishers that weights come from, each once."""

    def __init__(self) -> None:
        self._mapped: dict[SharedFile, Tensor] = {}

    async def fetch(self, offer: ShmOffer, _shape: PartShape, memory: Tensor) -> None:
        if offer.file not in self._mapped:
            self._mapped[offer.file] = _map(offer.file)
        source = self._mapped[offer.file][offer.offset : offer.offset + memory.numel()]
        await asyncio.to_thread(_copy, source, memory)

    def keep(self, offers: list[ShmOffer]) -> None:
        files = {offer.file for offer in offers}
        self._mapped = {file: found for file, found in self._mapped.items() if file in files}


def _copy(source: Tensor, memory: Tensor) -> None:
    memory.copy_(source)
    memory[:MARK_BYTES].copy_(source[:MARK_BYTES])


def _map(file: SharedFile) -> Tensor:
    if file.host != this_host():
        why = f"{file} that offers them runs on another host, or in another container"
        raise TransportUnavailable("shm", why, ELSEWHERE)
    try:
        descriptor = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY)
    except PermissionError:
        why = f"this process may not open the files of {file} (another user, or hardened)"
        raise TransportUnavailable("shm", why, ELSEWHERE) from None
    except OSError:
        raise PublisherGone("shm", str(file)) from None
    with os.fdopen(descriptor, "rb", buffering=0):
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            raise PublisherGone("shm", str(file))
        mapped = mmap.mmap(descriptor, file.nbytes, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)
