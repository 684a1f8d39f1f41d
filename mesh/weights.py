"""Versioned weights on their way from one publisher to many receivers, never a mix of two versions.

Two registered buffers are written in turn. A buffer holds the version, then the tensors, then the
version again; the publisher invalidates both marks before it touches the tensors. Who publishes or
pulls when is decided elsewhere: nothing here waits for a receiver.

    | version | tensor | tensor | ... | version |      (one flat run of bytes)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.mesh.transport import BufferHandle, SendBuffer, read

ALIGNMENT = 64
NO_VERSION = -1


class TornWeights(RuntimeError):
    """The bytes that arrived do not all belong to the version that was asked for."""

    def __init__(self, wanted: int, front: int, back: int) -> None:
        super().__init__(wanted, front, back)

    def __str__(self) -> str:
        wanted, front, back = self.args
        return (
            f"asked for weights of version {wanted} but read marks {front} and {back}: "
            "the publisher has moved on, so pull the handle of the newest version"
        )


class PullAbandoned(RuntimeError):
    """A receiver stopped waiting for a version, because another one was asked of it."""

    def __init__(self, version: int) -> None:
        super().__init__(version)

    def __str__(self) -> str:
        return f"version {self.args[0]} has not arrived, and a newer pull does not wait for it"


class WeightsMismatch(ValueError):
    """A model does not have the parameters that a manifest names."""


@dataclass(frozen=True)
class Entry:
    """One tensor in the flat run of bytes; `names` are all the names it has in the model."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """How many bytes the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WeightManifest:
    """Which tensors lie where. Tensors that share memory are stored once."""

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, model: nn.Module) -> WeightManifest:
        """Lay out the tensors of a model's state dict, in its order."""
        shared: dict[tuple[Any, ...], list[str]] = {}
        tensors = model.state_dict()
        for name, tensor in tensors.items():
            shared.setdefault(_identity(tensor), []).append(name)
        entries: list[Entry] = []
        offset = ALIGNMENT
        for names in shared.values():
            first = tensors[names[0]]
            entries.append(Entry(tuple(names), tuple(first.shape), first.dtype, offset))
            offset = _aligned(offset + first.nbytes)
        return cls(tuple(entries), offset + ALIGNMENT)

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold."""
        return sum(torch.Size(entry.shape).numel() for entry in self.entries)

    def tensors(self, memory: Tensor) -> Iterator[tuple[Entry, Tensor]]:
        """Each entry with its view of the flat memory."""
        for entry in self.entries:
            flat = memory[entry.offset : entry.offset + entry.nbytes]
            yield entry, flat.view(entry.dtype).view(entry.shape)

    def check(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's tensors by name, or an error that names the first one that does not fit."""
        own = model.state_dict()
        named = {name: entry for entry in self.entries for name in entry.names}
        for name in [*named, *own]:
            if name not in own or name not in named:
                where = "the receiving model" if name not in own else "the published weights"
                raise WeightsMismatch(f"{name} is missing in {where}: build both from one config")
            entry, tensor = named[name], own[name]
            if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
                raise WeightsMismatch(
                    f"{name} is published as {entry.dtype} {entry.shape} but the receiving model "
                    f"has {tensor.dtype} {tuple(tensor.shape)}: build both from one config"
                )
        return own


@dataclass(frozen=True)
class WeightsHandle:
    """Where one version of the weights can be read."""

    version: int
    manifest: WeightManifest
    buffer: BufferHandle


class WeightPublisher:
    """Offers the weights of one model, a version at a time."""

    def __init__(self, model: nn.Module, manifest: WeightManifest | None = None) -> None:
        self.manifest = manifest or WeightManifest.of(model)
        self.manifest.check(model)
        self._model = model
        self._buffers = (SendBuffer(self.manifest.nbytes), SendBuffer(self.manifest.nbytes))
        self._next = 0

    async def publish(self, version: int) -> WeightsHandle:
        """Copy the weights into the buffer that was not handed out last. Waits for no reader."""
        if version < 0:
            raise ValueError(f"version is {version}, but must be at least 0")
        buffer = self._buffers[self._next]
        _mark(buffer.bytes, NO_VERSION)
        self._copy_to(buffer.bytes)
        _mark(buffer.bytes, version)
        self._next = 1 - self._next
        return WeightsHandle(version, self.manifest, await buffer.whole())

    async def close(self) -> None:
        """Give both buffers back."""
        for buffer in self._buffers:
            await buffer.close()

    @torch.no_grad()
    def _copy_to(self, memory: Tensor) -> None:
        own = self._model.state_dict()
        for entry, place in self.manifest.tensors(memory):
            place.copy_(own[entry.names[0]])


@dataclass(frozen=True, eq=False)
class StagedWeights:
    """Weights that have arrived; good until the receiver receives again."""

    version: int
    manifest: WeightManifest
    memory: Tensor

    @torch.no_grad()
    def apply(self, model: nn.Module, rate: float = 1.0) -> None:
        """Move a model's weights to these, in place, by a share of the way: 1 copies them."""
        _check_marks(self.memory, self.version)
        own = self.manifest.check(model)
        for entry, tensor in self.manifest.tensors(self.memory):
            for place in {_identity(own[name]): own[name] for name in entry.names}.values():
                if rate == 1.0 or not place.is_floating_point():
                    place.copy_(tensor)
                else:
                    place.lerp_(tensor, rate)


class WeightReceiver:
    """Fetches weights into one staging buffer that is used again and again.

    A read from a process that is gone ends after minutes only. Until then the memory that it may
    write to belongs to it, also when nobody waits for it any more.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._abandoned: asyncio.Future[None] | None = None

    async def receive(self, handle: WeightsHandle) -> StagedWeights:
        """Read one version. Waits for the transfer; what was staged before is gone.

        One call at a time; `abandon` ends it with `PullAbandoned`.
        """
        memory, self._memory = self._memory, None
        if memory is None or memory.numel() != handle.manifest.nbytes:
            memory = torch.empty(handle.manifest.nbytes, dtype=torch.uint8)
        _mark(memory, NO_VERSION)
        await self._read(handle, memory)
        _check_marks(memory, handle.version)
        self._memory = memory
        return StagedWeights(handle.version, handle.manifest, memory)

    def abandon(self) -> None:
        """Wait no longer for a version that is on its way, if one is."""
        if self._abandoned is not None and not self._abandoned.done():
            self._abandoned.set_result(None)

    async def _read(self, handle: WeightsHandle, memory: Tensor) -> None:
        self._abandoned = asyncio.get_running_loop().create_future()
        reading = asyncio.ensure_future(read(handle.buffer, memory))
        reading.add_done_callback(_heard)
        either: list[asyncio.Future[Any]] = [reading, self._abandoned]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise PullAbandoned(handle.version)
        reading.result()


def _heard(reading: asyncio.Future[Any]) -> None:
    if not reading.cancelled():
        reading.exception()


def _marks(memory: Tensor) -> tuple[Tensor, Tensor]:
    return memory[:8].view(torch.int64), memory[-8:].view(torch.int64)


def _mark(memory: Tensor, version: int) -> None:
    for mark in _marks(memory):
        mark.fill_(version)


def _check_marks(memory: Tensor, version: int) -> None:
    front, back = (int(mark.item()) for mark in _marks(memory))
    if not front == back == version:
        raise TornWeights(version, front, back)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
