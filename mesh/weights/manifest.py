"""The tensors of a version of the weights, the rows that each rank publishes, and their layout.

A plain tensor is the same on every rank, so rank 0 publishes it. Of a tensor sharded over ranks by
its first dimension (FSDP2), each rank publishes its own rows, of which there may be none. A rank's
rows are laid out in a flat byte buffer:

| stamp | rows of a tensor | rows of another | ... | stamp |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.configs.weights import WeightTransport
from composer_mesh.configs.worded import Worded


class TornWeights(Worded, RuntimeError):
    """The received bytes do not all belong to the requested version: it, and both stamps read."""

    message = (
        "requested weights of version {0} but read version stamps {1} and {2}: "
        "the publisher has moved on, so pull the handle of the newest version"
    )


class WrongChecksum(Worded, RuntimeError):
    """Received bytes are not the publisher's: tensor, rank of the part, version."""

    message = (
        "{0} of rank {1}'s part of version {2} has another checksum than the publisher "
        "gave it, so bytes changed in transit: pull again, and suspect memory or network if it "
        "recurs"
    )


class PullAbandoned(Worded, RuntimeError):
    """A receiver stopped waiting for a version, because another one was requested."""

    message = "version {0} has not arrived, and a newer pull does not wait for it"


class PublisherGone(Worded, RuntimeError):
    """Published weights are gone with their publisher: the transport and the location."""

    failure_class = "infrastructure"
    message = (
        "weights offered by {0} at {1} are gone, and their publisher with them: "
        "pull from the publisher that took its place"
    )


class TransportUnavailable(Worded, RuntimeError):
    """A process cannot use a transport: its name, the reason, and the repair."""

    message = "weights cannot be sent by {0}, because {1}: {2}"


class WeightsMismatch(ValueError):
    """Published weights do not fit the receiving model, or are incomplete."""


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


@dataclass(frozen=True, eq=False)
class OwnRows:
    """This rank's rows of one tensor, from row `first` on; a scalar is one row."""

    entry: Entry
    first: int
    count: int
    local: Tensor


def own_rows(state: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None) -> list[OwnRows]:
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


def manifest_of(rows: list[OwnRows]) -> WeightManifest:
    """Return the manifest of the complete tensors."""
    return WeightManifest(tuple(one.entry for one in rows))


def _rows(names: tuple[str, ...], tensor: Tensor, rank: int, dtype: torch.dtype | None) -> OwnRows:
    published = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    entry = Entry(names, tuple(tensor.shape), published)
    local = _local(tensor)
    if local is tensor:
        return OwnRows(entry, 0, entry.rows if rank == 0 else 0, local)
    first, count = _share(names[0], tensor, entry.rows)
    if count and local.dim() and local.shape[0] != count:
        raise WeightsMismatch(
            f"{names[0]} has {local.shape[0]} rows on rank {rank}, but an even spread of "
            f"{entry.rows} gives it {count}: call full_tensor() on it first"
        )
    return OwnRows(entry, first, count, local)


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


ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """`count` rows from row `first` of the manifest's tensor `entry`, at byte `offset`."""

    entry: int
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class PieceLayout:
    """Positions of the pieces; version stamps are before and after them."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @classmethod
    def of(cls, rows: Sequence[OwnRows]) -> PieceLayout:
        """Lay out a rank's rows in order; tensors without rows take no space."""
        pieces: list[Piece] = []
        offset = ALIGNMENT
        for place, one in enumerate(rows):
            if one.count:
                pieces.append(Piece(place, one.first, one.count, offset))
                end = offset + one.count * one.entry.row_bytes
                offset = -(-end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(pieces), offset + ALIGNMENT)

    def views(self, manifest: WeightManifest, memory: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with its view of the flat memory, in the tensor's dtype and shape."""
        for piece in self.pieces:
            entry = manifest.entries[piece.entry]
            nbytes = piece.count * entry.row_bytes
            flat = memory[piece.offset : piece.offset + nbytes].view(entry.dtype)
            yield piece, flat.view((piece.count, *entry.shape[1:]) if entry.shape else ())


NOT_WHOLE = -1


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a version: the layout of its rows, and the offer to fetch them."""

    rank: int
    transport: WeightTransport
    layout: PieceLayout
    serial: int
    offer: Any
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WeightsHandle:
    """Describes how to fetch one version of the weights. The handle is sent, not the bytes."""

    version: int
    manifest: WeightManifest
    parts: tuple[RankPart, ...]

    @classmethod
    def joined(cls, handles: Sequence[WeightsHandle]) -> WeightsHandle:
        """Join the handles of all ranks; raises `WeightsMismatch` unless of one version."""
        first = handles[0]
        for rank, other in enumerate(handles):
            if other.version != first.version:
                raise WeightsMismatch(
                    f"rank {rank} published version {other.version} but rank 0 version "
                    f"{first.version}: publish on all ranks after the same step"
                )
            if other.manifest != first.manifest:
                raise WeightsMismatch(
                    f"rank {rank} published {_first_difference(other, first)}: give every rank "
                    "the same tensors in the same order"
                )
        parts = tuple(part for handle in handles for part in handle.parts)
        whole = cls(first.version, first.manifest, parts)
        whole.check_whole()
        return whole

    def check_whole(self) -> None:
        """Raise `WeightsMismatch` unless the parts have every row of every tensor exactly once."""
        found: dict[int, list[tuple[int, int]]] = {}
        for part in self.parts:
            for piece in part.layout.pieces:
                found.setdefault(piece.entry, []).append((piece.first, piece.count))
        for place, entry in enumerate(self.manifest.entries):
            reached = 0
            for first, count in sorted(found.get(place, [])):
                reached = reached + count if first == reached else NOT_WHOLE
            if reached != entry.rows:
                raise WeightsMismatch(
                    f"{entry.names[0]} has {entry.rows} rows, but the parts of ranks "
                    f"{[part.rank for part in self.parts]} do not make them: join the handles of "
                    "all ranks, each once"
                )


def _first_difference(one: WeightsHandle, other: WeightsHandle) -> str:
    ours, theirs = one.manifest.entries, other.manifest.entries
    for own, its in zip(ours, theirs, strict=False):
        if own != its:
            return f"{own} where rank 0 has {its}"
    return f"{len(ours)} tensors where rank 0 has {len(theirs)}"
