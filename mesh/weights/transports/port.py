"""The transport interface: offer one of a publisher's two buffers, and fetch what was offered.

Transports do not interpret the bytes; callers check that they belong together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from composer_mesh.mesh.weights.manifest import Layout, Piece, WeightManifest

SLOTS = 2
"""Buffers of a publisher: one is read while the other is written."""


@dataclass(frozen=True)
class Shape:
    """Contents of one part: its tensors, their layout, and its rank."""

    manifest: WeightManifest
    layout: Layout
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

    async def fetch(self, offer: Any, shape: Shape, memory: Tensor) -> None:
        """Fetch a part into memory, uint8 [nbytes]. Its front stamp is read after all the rest."""

    def keep(self, offers: list[Any]) -> None:
        """Release the resources of all but these offers; only these will be fetched from now on."""
