"""What a carrier does: offer one of two memories of a publisher, and fetch what was offered.

What the bytes mean, and whether they belong together, is checked by who uses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from composer_mesh.mesh.weights.layout import Layout, Piece
from composer_mesh.mesh.weights.manifest import WeightManifest

SLOTS = 2
"""Memories of a publisher: one is read while the other is written."""


@dataclass(frozen=True)
class Shape:
    """What one part holds, as far as a carrier cares: tensors, places, and whose part it is."""

    manifest: WeightManifest
    layout: Layout
    rank: int

    def views(self, memory: Tensor) -> Iterator[tuple[str, Piece, Tensor]]:
        """Each piece with the name of its tensor and its view of the memory."""
        for piece, view in self.layout.views(self.manifest, memory):
            yield self.manifest.entries[piece.entry].names[0], piece, view


class TransportSender(Protocol):
    """The publisher's side, with its memories."""

    def memory(self, slot: int) -> Tensor:
        """The memory to write a part into, uint8 [nbytes]; always the same one."""

    async def offer(self, slot: int) -> Any:
        """What travels to receivers so that they can fetch what the memory holds now."""

    async def close(self) -> None:
        """Give everything back: what was offered can no longer be fetched."""


class TransportReceiver(Protocol):
    """The receiver's side of one transport."""

    async def fetch(self, offer: Any, shape: Shape, memory: Tensor) -> None:
        """Bring a part into memory, uint8 [nbytes]. Its front mark is read after all the rest."""

    def keep(self, offers: list[Any]) -> None:
        """Only these offers will be fetched from now on: what belongs to others may go."""
