"""A step's batch, pickled once for all ranks in pieces.

A message that holds it costs its sender and its receiver one copy of the bytes each.
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
"""Bytes pickled before yielding to the event loop: some milliseconds."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch in transfer to the ranks: pickled samples, views and pairs, and the other fields."""

    rest: StepBatch
    samples: Pieces
    views: Pieces
    pairs: Pieces

    @classmethod
    async def of(cls, batch: StepBatch) -> PackedBatch:
        """Pack a batch; yields to the event loop in between."""
        rest = replace(batch, samples=[], views=[], pairs=[])
        parts = [await _packed(items) for items in (batch.samples, batch.views, batch.pairs)]
        return cls(rest, *parts)

    def unpack(self) -> StepBatch:
        """Return a batch equal to the packed one. CPU-heavy: run it in a thread."""
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
