"""Weights as safetensors files, a last resort for hosts that share only a file system.

A file is written completely, then renamed into place; only the last two are kept. It holds the
rank's rows under their tensors' names, so that any tool can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from composer_mesh.mesh.progress import made_progress
from composer_mesh.mesh.weights.manifest import PublisherGone, TornWeights
from composer_mesh.mesh.weights.transports.port import (
    MARK_BYTES,
    NO_VERSION,
    SLOTS,
    PartShape,
    TransportReceiver,
)

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
