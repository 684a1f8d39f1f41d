"""Layout of one rank's part of a version in a flat byte buffer. Copies nothing.

| stamp | rows of a tensor | rows of another | ... | stamp |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from composer_mesh.mesh.weights.manifest import WeightManifest
from composer_mesh.mesh.weights.shards import Rows

ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """`count` rows from row `first` of the manifest's tensor `entry`, at byte `offset`."""

    entry: int
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Positions of the pieces; version stamps are before and after them."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> Layout:
        """Lay out a rank's rows in order; tensors without rows take no space."""
        pieces: list[Piece] = []
        offset = ALIGNMENT
        for place, one in enumerate(rows):
            if one.count:
                pieces.append(Piece(place, one.first, one.count, offset))
                offset = _aligned(offset + one.count * one.entry.row_bytes)
        return cls(tuple(pieces), offset + ALIGNMENT)

    def views(self, manifest: WeightManifest, memory: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with its view of the flat memory, in the tensor's dtype and shape."""
        for piece in self.pieces:
            entry = manifest.entries[piece.entry]
            nbytes = piece.count * entry.row_bytes
            flat = memory[piece.offset : piece.offset + nbytes].view(entry.dtype)
            yield piece, flat.view((piece.count, *entry.shape[1:]) if entry.shape else ())


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
