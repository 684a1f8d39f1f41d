"""Grouping of sequences into microbatches and packed rows, from their lengths only.

A step's batch, pickled once for all ranks in pieces.

A message that holds it costs its sender and its receiver one copy of the bytes each.

Grouping of sequences that begin alike into microbatches, so that most of it is computed once.

    units -> families: neighbours in the order of their ids -> parts that fit -> microbatches

A unit is what needs one forward together: a sample, or both sides of a pair.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any

from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.prefix_tree import (
    MIN_SHARED,
    ROW_CAPACITY,
    WORTH,
    PrefixTree,
    shared_length,
    unique_ids,
)

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
    groups: list[FillingRows] = []
    check_fits(lengths, budget)
    for index in longest_first(lengths):
        # Packed rows have gaps that shorter sequences fill; unpacked rows have none.
        tried = groups if packed else groups[-1:]
        rows = next((rows for rows in tried if rows.take(index, lengths[index], budget)), None)
        if rows is None:
            groups.append(FillingRows(lengths[index], packed))
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
    rows = FillingRows(max(lengths, default=0), packed=True)
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
class FillingRows:
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


Unit = Sequence[list[int]]
Shape = list[tuple[int, int]]
"""Rows and width of each level."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """Indices of units that share a beginning, and the size of their forwards."""

    units: list[int]
    shape: Shape

    @property
    def tokens(self) -> int:
        """Number of positions that are computed, padding included."""
        return positions(self.shape)


def parts_of(units: Sequence[Unit], budget: int, sharing: Sharing = "levels") -> list[SharedPart]:
    """Divide units into parts that compute at most `budget` tokens; a larger unit is a part alone.

    What a family shares is computed again in each of its parts.
    """
    parts = []
    for family in families(units):
        while family:
            parts.append(_first_part(units, family, budget, sharing))
            family = family[len(parts[-1].units) :]
    return parts


def _first_part(
    units: Sequence[Unit], family: Sequence[int], budget: int, sharing: Sharing
) -> SharedPart:
    """Return a part of as many units of a family as fit the budget, at least the first."""
    count = _fitting(units, family, budget)
    while True:
        part = _part(units, family[:count], sharing)
        if part.tokens <= budget or count == 1:
            return part
        count = max(1, min(count - 1, count * budget // part.tokens))  # rows are padded


def _part(units: Sequence[Unit], members: Sequence[int], sharing: Sharing) -> SharedPart:
    """Return the part of some units."""
    tree = PrefixTree.planned([ids for index in members for ids in units[index]], sharing)
    return SharedPart(list(members), [(level.rows, level.width) for level in tree.levels])


def balanced_parts(
    units: Sequence[Unit], budget: int, ranks: int, sharing: Sharing
) -> list[SharedPart]:
    """Divide units into parts as `parts_of`, further where that clearly spares the busiest rank.

    The largest part is halved again and again, until ranks have about the same, or computing what
    halves share twice would make all of them busier than the busiest one was.
    """
    best = found = parts_of(units, budget, sharing)
    while _busiest(best, ranks) * WORTH > _tokens(found) / ranks:
        divisible = [part for part in found if len(part.units) > 1]
        if not divisible or _busiest(found, ranks) * ranks * WORTH <= _tokens(found):
            break
        largest = max(divisible, key=lambda part: part.tokens)
        middle = len(largest.units) // 2
        halves = (largest.units[:middle], largest.units[middle:])
        rest = [part for part in found if part is not largest]
        found = rest + [_part(units, half, sharing) for half in halves]
        if _busiest(found, ranks) <= WORTH * _busiest(best, ranks):
            best = found
    return best


def _tokens(parts: Sequence[SharedPart]) -> int:
    return sum(part.tokens for part in parts)


def _busiest(parts: Sequence[SharedPart], ranks: int) -> int:
    """Return the tokens of the rank that has most."""
    tokens = [part.tokens for part in parts]
    return max(sum(tokens[index] for index in share) for share in spread(tokens, ranks))


def families(units: Sequence[Unit]) -> list[list[int]]:
    """Group units that begin with `MIN_SHARED` ids or more in common, in the order of their ids."""
    order = sorted(range(len(units)), key=lambda index: units[index][0])
    found: list[list[int]] = []
    for index in order:
        if found and shared_length(units[found[-1][-1]][0], units[index][0]) >= MIN_SHARED:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _fitting(units: Sequence[Unit], family: Sequence[int], budget: int) -> int:
    """Return how many units of a family have at most `budget` distinct tokens, at least one."""
    tokens = unique_ids(units[family[0]])
    for count, (before, index) in enumerate(pairwise(family), 1):
        tokens += unique_ids(units[index]) - shared_length(units[before][0], units[index][0])
        if tokens > budget:
            return count
    return len(family)


def shared_microbatches(
    parts: Sequence[SharedPart], budget: int, sharing: Sharing = "levels"
) -> list[list[int]]:
    """Group parts, by their indices, into microbatches of at most `budget` tokens: first fit.

    A part is not added where that pads more than `ROW_CAPACITY` tokens: a forward more costs less.
    """
    groups: list[_Group] = []
    joined = _in_one_row if sharing == "row" else _side_by_side
    for index in sorted(range(len(parts)), key=lambda index: (-parts[index].tokens, index)):
        if not any(group.take(index, parts[index], budget) for group in groups):
            groups.append(_Group([index], parts[index].shape, joined))
    return [group.parts for group in groups]


def positions(shape: Shape) -> int:
    """Return the number of positions of rows, padded to the width of their level."""
    return sum(rows * width for rows, width in shape)


def _side_by_side(one: Shape, other: Shape) -> Shape:
    """Return the shape of two parts whose rows are padded to the widest of each level."""
    levels = zip_longest(one, other, fillvalue=(0, 0))
    return [(rows + more, max(width, wider)) for (rows, width), (more, wider) in levels]


def _in_one_row(one: Shape, other: Shape) -> Shape:
    """Return the shape of two parts that are one row."""
    return [(1, positions(one) + positions(other))]


@dataclass
class _Group:
    """Parts of one microbatch, and the shape of its forwards."""

    parts: list[int]
    shape: Shape
    joined: Callable[[Shape, Shape], Shape]

    def take(self, index: int, part: SharedPart, budget: int) -> bool:
        """Add a part, unless that would exceed the budget or pad too much."""
        shape = self.joined(self.shape, part.shape)
        tokens = positions(shape)
        if tokens > budget or tokens - positions(self.shape) - part.tokens > ROW_CAPACITY:
            return False
        self.parts.append(index)
        self.shape = shape
        return True
