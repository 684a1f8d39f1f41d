"""Grouping of sequences into microbatches and packed rows, from their lengths only.

A step's batch, pickled once for all ranks in pieces.

A message that holds it costs its sender and its receiver one copy of the bytes each.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


def microbatches(lengths: Sequence[int], budget: int, packed: bool = False) -> list[list[int]]:
    """Group indices so that rows times the longest row is at most `budget` tokens.

    A row is one sequence, or with `packed` as many as fit. Longest first; every index appears once.
    Raises ValueError for a sequence longer than the budget.
    """
    groups: list[Rows] = []
    check_fits(lengths, budget)
    for index in longest_first(lengths):
        # Packed rows have gaps that shorter sequences fill; unpacked rows have none.
        tried = groups if packed else groups[-1:]
        rows = next((rows for rows in tried if rows.take(index, lengths[index], budget)), None)
        if rows is None:
            groups.append(Rows(lengths[index], packed))
            groups[-1].take(index, lengths[index])
    return [rows.taken for rows in groups]


def check_fits(lengths: Sequence[int], budget: int) -> None:
    """Raise ValueError for a sequence longer than the budget."""
    longest = max(lengths, default=0)
    if longest > budget:
        raise ValueError(
            f"a sequence has {longest} tokens but a microbatch holds {budget}: raise "
            "trainer.microbatch_tokens or lower policy.max_context"
        )


def packed_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Pack indices into rows no longer than the longest sequence: first fit, longest first.

    These are the rows of one packed microbatch.
    """
    rows = Rows(max(lengths, default=0), packed=True)
    for index in longest_first(lengths):
        rows.take(index, lengths[index])
    return rows.rows


def spread(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divide indices into parts of about equal weight: heaviest first, to the lightest part.

    Indices stay in order within each part.
    """
    loads, shares = [0] * parts, [list[int]() for _ in range(parts)]
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        part = min(range(parts), key=lambda part: (loads[part], part))
        loads[part] += weights[place]
        shares[part].append(place)
    return [sorted(share) for share in shares]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return indices from the longest to the shortest; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@dataclass
class Rows:
    """Rows of one width being filled; `taken` lists the placed indices in insertion order."""

    width: int
    packed: bool
    rows: list[list[int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def take(self, index: int, length: int, budget: int | None = None) -> bool:
        """Place a sequence in a row; return False if that would exceed the token budget."""
        place = next((row for row, free in enumerate(self.free) if free >= length), None)
        if place is None:
            if budget is not None and self.width * (len(self.rows) + 1) > budget:
                return False
            place = len(self.rows)
            self.rows.append([])
            self.free.append(self.width if self.packed else length)
        self.rows[place].append(index)
        self.free[place] -= length
        self.taken.append(index)
        return True
