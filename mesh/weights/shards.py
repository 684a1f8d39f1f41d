"""Selects the rows of each tensor that this rank publishes.

A plain tensor is the same on every rank, so rank 0 publishes it. Of a tensor sharded over ranks by
its first dimension (FSDP2), each rank publishes its own rows, of which there may be none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_mesh.mesh.weights.errors import WeightsMismatch
from composer_mesh.mesh.weights.manifest import Entry, WeightManifest, identity


@dataclass(frozen=True, eq=False)
class Rows:
    """This rank's rows of one tensor, from row `first` on; a scalar is one row."""

    entry: Entry
    first: int
    count: int
    local: Tensor


def own_rows(state: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None) -> list[Rows]:
    """Return this rank's rows of every tensor, in the state's order, shared memory only once.

    Floating tensors are published as `dtype` where given. The entries are the same on every rank.
    Raises `WeightsMismatch` for a tensor that is sharded other than by rows.
    """
    shared: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state.items():
        local = _local(tensor)
        # All empty memory is at one address; a tied tensor is one object in the trainer's state.
        key = (*identity(local), tuple(tensor.shape), 0 if local.numel() else id(tensor))
        shared.setdefault(key, []).append(name)
    return [_rows(tuple(names), state[names[0]], rank, dtype) for names in shared.values()]


def manifest_of(rows: list[Rows]) -> WeightManifest:
    """Return the manifest of the complete tensors."""
    return WeightManifest(tuple(one.entry for one in rows))


def _rows(names: tuple[str, ...], tensor: Tensor, rank: int, dtype: torch.dtype | None) -> Rows:
    published = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    entry = Entry(names, tuple(tensor.shape), published)
    local = _local(tensor)
    if local is tensor:
        return Rows(entry, 0, entry.rows if rank == 0 else 0, local)
    first, count = _share(names[0], tensor, entry.rows)
    if count and local.dim() and local.shape[0] != count:
        raise WeightsMismatch(
            f"{names[0]} has {local.shape[0]} rows on rank {rank}, but an even spread of "
            f"{entry.rows} gives it {count}: call full_tensor() on it first"
        )
    return Rows(entry, first, count, local)


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor that may be a `DTensor`, without its slow import."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _share(name: str, tensor: Any, rows: int) -> tuple[int, int]:
    """Return the first row and row count to publish; of replicas, the first rank publishes."""
    first, coordinate = 0, tensor.device_mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        place, size = coordinate[dim], tensor.device_mesh.size(dim)
        if placement.is_replicate():
            rows = rows if place == 0 else 0
        elif placement.is_shard(0):
            most = -(-rows // size)
            begin = min(place * most, rows)
            first, rows = first + begin, min(most, rows - begin)
        else:
            raise WeightsMismatch(
                f"{name} is placed as {tuple(tensor.placements)}, but only whole tensors and rows "
                "of the first dimension are published: call full_tensor() on it first"
            )
    return first, rows
