"""The transports of weights that need no Monarch, and the interface of them all.

A transport offers one of a publisher's two buffers, and fetches what was offered. It does not
interpret the bytes; callers check that they belong together, by version stamps before and after a
part: its version, and a unique serial number per publish. The publisher clears them before it
writes and sets them afterwards. A reader that reads a stamp after everything else, and finds it
set, has therefore read no concurrent writes.

A checksum at memory speed detects changed, lost and reordered bytes: sums of 64-bit words, row by
row, and a sum of those weighted by their index, all modulo 2**64. A single wrong word is always
detected; reordered rows too. It detects faults, not tampering.

    shm    anonymous shared memory of one host, which leaves nothing behind. The publisher creates
           an anonymous file of both buffers and offers its pid and descriptor, with which processes
           of the same user open it. The kernel frees it with the last process that has it mapped,
           however that ends. A receiver maps it once, read-only, and copies.
    disk   safetensors files, a last resort for hosts that share only a file system. A file is
           written completely, then renamed into place; only the last two are kept. It holds the
           rank's rows under their tensors' names, so that any tool can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from composer_mesh.mesh.machine import this_host
from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.weights.manifest import (
    Piece,
    PieceLayout,
    PublisherGone,
    TornWeights,
    TransportUnavailable,
    WeightManifest,
)

SLOTS = 2
"""Buffers of a publisher: one is read while the other is written."""


@dataclass(frozen=True)
class PartShape:
    """Contents of one part: its tensors, their layout, and its rank."""

    manifest: WeightManifest
    layout: PieceLayout
    rank: int

    def views(self, memory: Tensor) -> Iterator[tuple[str, Piece, Tensor]]:
        """Yield the name of each piece's tensor, the piece, and its view of the memory."""
        for piece, view in self.layout.views(self.manifest, memory):
            yield self.manifest.entries[piece.entry].names[0], piece, view


class TransportSender(Protocol):
    """The publisher's side of a transport, with its buffers."""

    def memory(self, slot: int) -> Tensor:
        """Return the buffer to write a part into, uint8 [nbytes]; always the same per slot."""

    async def offer(self, slot: int) -> Any:
        """Return what receivers need to fetch the buffer's current contents."""

    async def close(self) -> None:
        """Free everything: what was offered can no longer be fetched."""


class TransportReceiver(Protocol):
    """The receiver's side of one transport."""

    async def fetch(self, offer: Any, shape: PartShape, memory: Tensor) -> None:
        """Fetch a part into memory, uint8 [nbytes]. Its front stamp is read after all the rest."""

    def keep(self, offers: list[Any]) -> None:
        """Release the resources of all but these offers; only these will be fetched from now on.

        Does nothing where nothing is kept.
        """


NO_VERSION = -1
MARK_BYTES = 16


def _stamps(memory: Tensor) -> tuple[Tensor, Tensor]:
    return memory[:MARK_BYTES].view(torch.int64), memory[-MARK_BYTES:].view(torch.int64)


def stamp(memory: Tensor, version: int, serial: int) -> None:
    for place in _stamps(memory):
        place.copy_(torch.tensor([version, serial]))


def unstamp(memory: Tensor) -> None:
    for place in _stamps(memory):
        place.fill_(NO_VERSION)


def check_stamps(memory: Tensor, version: int, serial: int) -> None:
    front, back = (place.tolist() for place in _stamps(memory))
    if not front == back == [version, serial]:
        raise TornWeights(version, front[0], back[0])


ROW = 512
"""Words per row: 4 KiB, less than anything that is moved as a unit."""
REST = 0x9E3779B1
"""Factor of the words after the last row; odd and large, so that they are not taken for one."""


def flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(memory: Tensor) -> int:
    """Return the checksum of flat bytes, uint8 [n], as a signed 64-bit number."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    full = words.numel() // ROW * ROW
    rows = words[:full].view(-1, ROW).sum(1)
    odd = torch.arange(
        1, 2 * rows.numel() + 1, 2
    )  # odd factors are invertible: no change of a row is lost
    rest = torch.cat([words[full:], memory[whole:].long()])
    places = torch.arange(1, 2 * rest.numel() + 1, 2)
    return int(((rows * odd).sum() + (rest * places).sum() * REST).item())


MEMORY_NAME = "composer-mesh-weights"
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


def why_no_shm() -> str | None:
    """Return why this machine does not support the transport; None if it does."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no anonymous shared files"
    return None


class ShmSender:
    """Both buffers of a publisher in one anonymous file, which cannot shrink under a reader."""

    def __init__(self, nbytes: int) -> None:
        if (why := why_no_shm()) is not None:
            raise TransportUnavailable("shm", why, ELSEWHERE)
        self._nbytes = nbytes
        self._slot_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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


MARK = "composer_mesh_mark"
FOLDER_PREFIX = "composer-mesh-weights-"
"""Name prefix of publishers' folders."""


@dataclass(frozen=True)
class DiskOffer:
    """The file of a part."""

    file: Path


class DiskSender:
    """Two buffers, and a private folder with their newest files."""

    def __init__(self, shape: PartShape, folder: Path | None) -> None:
        self._shape = shape
        self._memories = [torch.zeros(shape.layout.nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=folder))
        self._files: list[Path] = []

    def memory(self, slot: int) -> Tensor:
        return self._memories[slot]

    async def offer(self, slot: int) -> DiskOffer:
        return DiskOffer(await asyncio.to_thread(self._write, self._memories[slot]))

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _write(self, memory: Tensor) -> Path:
        version, serial = memory[:MARK_BYTES].view(torch.int64).tolist()
        name = f"version-{version}-rank-{self._shape.rank}-{secrets.token_hex(4)}.safetensors"
        draft, file = self._folder / f".{name}", self._folder / name
        tensors = {name: view for name, _, view in self._shape.views(memory)}
        save_file(tensors, draft, metadata={MARK: f"{version} {serial}"})
        draft.replace(file)
        self._files.append(file)
        while len(self._files) > SLOTS:
            with contextlib.suppress(FileNotFoundError):
                self._files.pop(0).unlink()
        return file


class DiskReceiver(TransportReceiver):
    """Reads files; caches nothing."""

    async def fetch(self, offer: DiskOffer, shape: PartShape, memory: Tensor) -> None:
        await asyncio.to_thread(_load, offer.file, shape, memory)


def _load(file: Path, shape: PartShape, memory: Tensor) -> None:
    if not file.parent.exists():
        raise PublisherGone("disk", str(file.parent))
    try:
        with safe_open(file, "pt") as opened:
            stamps = [int(one) for one in opened.metadata()[MARK].split()]
            for name, _, view in shape.views(memory):
                view.copy_(opened.get_tensor(name))
                made_progress(f"{name} from {file.name}")
    except (FileNotFoundError, SafetensorError) as error:
        raise TornWeights(_version(file), NO_VERSION, NO_VERSION) from error
    for place in (memory[:MARK_BYTES], memory[-MARK_BYTES:]):
        place.view(torch.int64).copy_(torch.tensor(stamps))


def _version(file: Path) -> int:
    return int(file.name.split("-")[1])
