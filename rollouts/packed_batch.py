"""A step's batch as bytes, pickled once for all ranks and piece by piece.

A message that holds it costs its sender and its reader a copy of the bytes. Nothing here knows
actors.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.rollouts.batches import StepBatch

Pieces = tuple[bytes, ...]
TURN_BYTES = 1 << 20
"""What is packed in one turn of the event loop: some milliseconds."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch on its way to the ranks: its samples, views and pairs as bytes, and what is left."""

    rest: StepBatch
    samples: Pieces
    views: Pieces
    pairs: Pieces

    @classmethod
    async def of(cls, batch: StepBatch) -> PackedBatch:
        """A batch packed. Other work of the event loop runs in between."""
        rest = replace(batch, samples=[], views=[], pairs=[])
        parts = [await _packed(items) for items in (batch.samples, batch.views, batch.pairs)]
        return cls(rest, *parts)

    def unpack(self) -> StepBatch:
        """The batch, equal to what was packed. It is work for a thread."""
        samples, views, pairs = map(_unpacked, (self.samples, self.views, self.pairs))
        return replace(self.rest, samples=samples, views=views, pairs=pairs)


async def _packed(items: Sequence[Any]) -> Pieces:
    pieces, turn = list[bytes](), 0
    for item in items:
        pieces.append(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        turn += len(pieces[-1])
        if turn >= TURN_BYTES:
            turn = 0
            await asyncio.sleep(0)
    return tuple(pieces)


def _unpacked(pieces: Pieces) -> list[Any]:
    return [pickle.loads(piece) for piece in pieces]
