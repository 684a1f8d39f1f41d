"""The transport interface: offer one of a publisher's two buffers, and fetch what was offered.

Transports do not interpret the bytes; callers check that they belong together, by version stamps
before and after a part: its version, and a unique serial number per publish. The publisher clears
them before it writes and sets them afterwards. A reader that reads a stamp after everything else,
and finds it set, has therefore read no concurrent writes.

A checksum at memory speed detects changed, lost and reordered bytes: sums of 64-bit words, row by
row, and a sum of those weighted by their index, all modulo 2**64. A single wrong word is always
detected; reordered rows too. It detects faults, not tampering.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_mesh.mesh.weights.manifest import Piece, PieceLayout, TornWeights, WeightManifest

SLOTS = 2
"""Buffers of a publisher: one is read while the other is written."""


@dataclass(frozen=True)
class PartShape:
    """Contents of one part: its tensors, their layout, and its rank."""

    manifest: WeightManifest
    layout: PieceLayout
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

    async def fetch(self, offer: Any, shape: PartShape, memory: Tensor) -> None:
        """Fetch a part into memory, uint8 [nbytes]. Its front stamp is read after all the rest."""

    def keep(self, offers: list[Any]) -> None:
        """Release the resources of all but these offers; only these will be fetched from now on.

        Does nothing where nothing is kept.
        """


NO_VERSION = -1
MARK_BYTES = 16


def _stamps(memory: Tensor) -> tuple[Tensor, Tensor]:
    return memory[:MARK_BYTES].view(torch.int64), memory[-MARK_BYTES:].view(torch.int64)


def stamp(memory: Tensor, version: int, serial: int) -> None:
    for place in _stamps(memory):
        place.copy_(torch.tensor([version, serial]))


def unstamp(memory: Tensor) -> None:
    for place in _stamps(memory):
        place.fill_(NO_VERSION)


def check_stamps(memory: Tensor, version: int, serial: int) -> None:
    front, back = (place.tolist() for place in _stamps(memory))
    if not front == back == [version, serial]:
        raise TornWeights(version, front[0], back[0])


ROW = 512
"""Words per row: 4 KiB, less than anything that is moved as a unit."""
REST = 0x9E3779B1
"""Factor of the words after the last row; odd and large, so that they are not taken for one."""


def flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(memory: Tensor) -> int:
    """Return the checksum of flat bytes, uint8 [n], as a signed 64-bit number."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    full = words.numel() // ROW * ROW
    rows = words[:full].view(-1, ROW).sum(1)
    odd = torch.arange(
        1, 2 * rows.numel() + 1, 2
    )  # odd factors are invertible: no change of a row is lost
    rest = torch.cat([words[full:], memory[whole:].long()])
    places = torch.arange(1, 2 * rest.numel() + 1, 2)
    return int(((rows * odd).sum() + (rest * places).sum() * REST).item())
