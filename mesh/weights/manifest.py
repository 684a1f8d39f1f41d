"""How the tensors of a model lie in one flat run of bytes. Moves none of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.mesh.weights.errors import WeightsMismatch

ALIGNMENT = 64


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
            shared.setdefault(identity(tensor), []).append(name)
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


def identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
