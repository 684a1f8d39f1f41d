"""Handles of published weights, joined from the parts that each rank published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.configs.weights import WeightTransport
from composer_mesh.mesh.weights.errors import WeightsMismatch
from composer_mesh.mesh.weights.manifest import Layout, WeightManifest

NOT_WHOLE = -1


@dataclass(frozen=True)
class Part:
    """One rank's part of a version: the layout of its rows, and the offer to fetch them."""

    rank: int
    transport: WeightTransport
    layout: Layout
    serial: int
    offer: Any
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WeightsHandle:
    """Describes how to fetch one version of the weights. The handle is sent, not the bytes."""

    version: int
    manifest: WeightManifest
    parts: tuple[Part, ...]

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
