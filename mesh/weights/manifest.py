"""The tensors of a version of the weights. `layout` says where their bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.mesh.weights.errors import WeightsMismatch

UPDATED = "updated_weights"
"""Attribute of a model of which only some tensors are published: their names."""


@dataclass(frozen=True)
class Entry:
    """One complete tensor; `names` are all its names in the model."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Format as `embed.weight, head.weight: torch.float32 (16, 8)`."""
        return f"{', '.join(self.names)}: {self.dtype} {self.shape}"

    @property
    def rows(self) -> int:
        """Size of the first dimension, by which it may be sharded over ranks; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WeightManifest:
    """The tensors in the publisher's order. Tensors that share memory are one entry."""

    entries: tuple[Entry, ...]

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(torch.Size(entry.shape).numel() for entry in self.entries)

    def places(self, model: nn.Module) -> list[list[Tensor]]:
        """Return, for each entry, the distinct tensors of a model that it fills.

        Those are all of its tensors, or the `UPDATED` ones. Raises `WeightsMismatch` with the name
        of the first tensor that does not fit.
        """
        own, updated = model.state_dict(), getattr(model, UPDATED, None)
        own = {name: one for name, one in own.items() if updated is None or name in updated}
        found = [_places(entry, own) for entry in self.entries]
        filled = {identity(place) for places in found for place in places}
        for name, tensor in own.items():
            if identity(tensor) not in filled:
                raise WeightsMismatch(
                    f"{name} is missing in the published weights: build both from one config"
                )
        return found


def _places(entry: Entry, own: dict[str, Tensor]) -> list[Tensor]:
    """Return an entry's tensors; another floating dtype is converted on application."""
    for name in entry.names:
        if name not in own:
            raise WeightsMismatch(
                f"{name} is missing in the receiving model: build both from one config"
            )
        tensor = own[name]
        converts = tensor.is_floating_point() and entry.dtype.is_floating_point
        if tuple(tensor.shape) != entry.shape or not (converts or tensor.dtype == entry.dtype):
            raise WeightsMismatch(
                f"{name} is published as {entry.dtype} {entry.shape} but the receiving model "
                f"has {tensor.dtype} {tuple(tensor.shape)}: build both from one config"
            )
    return list({identity(own[name]): own[name] for name in entry.names}.values())


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same memory, also where both are empty."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
