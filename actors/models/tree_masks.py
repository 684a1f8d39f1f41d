"""Which keys each position of a prefix tree sees: dense masks, and blocks for FlexAttention.

A position sees the keys of its own node and of those before it, up to itself; in layers with a
window, only those fewer than so many positions before it, and in chunked ones those of its chunk:

    key.first <= query.first < key.last
    query.position - window < key.position <= query.position
    query.position - query.position % chunk <= key.position

where `first` and `last` number the sequences that pass through a node.

Axes: R rows, L length of a level, K keys: those of the levels before, then the level's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Chunk:
    """The reach of layers that see what precedes a position in its chunk of `size` positions."""

    size: int


Reach = int | Chunk | None
"""How far a layer looks back: a window, its chunk, or None for everything."""

Windows = Mapping[str, Reach]
"""How far layers of a kind look back."""

BLOCK = 128
"""Positions of a block of FlexAttention's kernels."""

FAR = 1 << 40
"""More than any position."""

PADDING = 1 << 40
"""The sequence of padding, which no node has."""


@dataclass(frozen=True)
class Places:
    """What is at each place of some rows, [R, L] each: the sequences of its node, its position.

    Padding belongs to sequences that no node has.
    """

    first: Tensor
    last: Tensor
    positions: Tensor

    def at(self, rows: Tensor) -> Places:
        """Return those of some rows, any of them several times."""
        return Places(self.first[rows], self.last[rows], self.positions[rows])

    def then(self, after: Places) -> Places:
        """Return these places followed by those after them, row by row."""
        return Places(
            torch.cat([self.first, after.first], 1),
            torch.cat([self.last, after.last], 1),
            torch.cat([self.positions, after.positions], 1),
        )

    def to(self, device: torch.device) -> Places:
        """Return a copy on a device."""
        return Places(self.first.to(device), self.last.to(device), self.positions.to(device))


def attention_masks(queries: Places, keys: Places, windows: Windows, blocks: bool) -> Any:
    """Return the mask of all layers, or where windows differ that of each kind of layer.

    It is dense, or of `blocks`. A window or chunk that all keys are in is none.
    """
    make = block_mask if blocks else dense_mask
    count = keys.first.shape[1]
    reach = {kind: one if _size(one) < count else None for kind, one in windows.items()}
    masks = {one: make(queries, keys, one) for one in set(reach.values())}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {kind: masks[one] for kind, one in reach.items()}


def _size(reach: Reach) -> int:
    return (reach.size if isinstance(reach, Chunk) else reach) or FAR


def _first_seen(positions: Tensor, size: int, chunked: bool) -> Tensor:
    """Return the first position that is within reach of each of some positions."""
    return positions - positions % size if chunked else positions - size + 1


def dense_mask(queries: Places, keys: Places, reach: Reach) -> Tensor:
    """Return whether each position sees each key, [R, 1, L, K]."""
    first, position = queries.first[:, :, None], queries.positions[:, :, None]
    others = keys.positions[:, None, :]
    seen = keys.first[:, None, :] <= first
    seen &= first < keys.last[:, None, :]
    seen &= others <= position
    if reach is not None:
        seen &= others >= _first_seen(position, _size(reach), isinstance(reach, Chunk))
    return seen[:, None]


def block_mask(queries: Places, keys: Places, reach: Reach) -> BlockMask:
    """Return the blocks of keys that each block of positions sees, from their extremes alone.

    A block may be named that turns out to be empty; the kernel masks what is not seen. Needs no
    dense mask, whose memory would grow with L times K. The kernel is never given `FAR`: compiled
    with dynamic sizes, it takes numbers as 32 bits.
    """
    size, chunked = _size(reach), isinstance(reach, Chunk)
    query, key = _Extremes.of(queries, axis=1), _Extremes.of(keys, axis=2)
    some = (
        (key.first.low <= query.first.high)
        & (query.first.low < key.last.high)
        & (key.positions.low <= query.positions.high)
        & (key.positions.high >= _first_seen(query.positions.low, size, chunked))
    )
    every = (
        (key.first.high <= query.first.low)
        & (query.first.high < key.last.low)
        & (key.positions.high <= query.positions.low)
        & (key.positions.low >= _first_seen(query.positions.high, size, chunked))
        & query.whole
        & key.whole
    )

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first, position = queries.first[row, query], queries.positions[row, query]
        other = keys.positions[row, key]
        follows = (keys.first[row, key] <= first) & (first < keys.last[row, key])
        return follows & (other <= position)

    def visible_in_reach(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = keys.positions[row, key] >= _first_seen(queries.positions[row, query], size, chunked)
        return visible(row, head, query, key) & near

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible if reach is None else visible_in_reach,
        seq_lengths=(queries.first.shape[1], keys.first.shape[1]),
    )


@dataclass(frozen=True)
class _Range:
    """Least and greatest number of each block."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, numbers: Tensor, axis: int) -> _Range:
        """Return those of blocks of [R, L], as a tensor that varies along `axis`."""
        missing = -numbers.shape[1] % BLOCK
        low = torch.nn.functional.pad(numbers, (0, missing), value=FAR)
        high = torch.nn.functional.pad(numbers, (0, missing), value=-FAR)
        blocks = numbers.shape[0], -1, BLOCK
        lowest, highest = low.view(blocks).amin(-1), high.view(blocks).amax(-1)
        return cls(lowest.unsqueeze(3 - axis), highest.unsqueeze(3 - axis))


@dataclass(frozen=True)
class _Extremes:
    """The ranges of blocks of places, and which blocks are whole."""

    first: _Range
    last: _Range
    positions: _Range
    whole: Tensor

    @classmethod
    def of(cls, places: Places, axis: int) -> _Extremes:
        """Return those of queries, whose blocks are on axis 1, or of keys, on axis 2."""
        first, last, positions = (
            _Range.of(numbers, axis) for numbers in (places.first, places.last, places.positions)
        )
        ends = BLOCK * torch.arange(1, first.low.numel() // len(places.first) + 1)
        whole = (ends <= places.first.shape[1]).to(places.first.device)
        return cls(first, last, positions, whole[:, None] if axis == 1 else whole)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are chosen for each block of positions, and which, first."""
    counts = chosen.sum(-1, dtype=torch.int32)
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts[:, None], indices.to(torch.int32)[:, None]
