"""Last hidden states of several sequences, whichever way they were computed.

Axes: B sequences, T the length of the longest, N selected rows, n those of them that this rank has,
P computed positions, H hidden size.

Sequences packed into the rows of one forward, each with its own positions from 0 on.

No token attends across a restart of positions: `packed_attention` computes each sequence by itself,
FlexAttention gets blocks, and otherwise transformers detects restarts, given no mask.
`rollouts.packing` decides the rows.

Axes: B sequences, T their padded length, R rows, L their length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from composer_mesh.actors.models.expert_parallel import ContextGroup
from composer_mesh.actors.models.tree_masks import Places
from composer_mesh.rollouts.packing import packed_rows


@dataclass(frozen=True)
class Rows:
    """The `states` [n, H] of N selected rows that this rank has: all, without a `context`.

    `index` [n] says which of the N they are. With a context `whole` and `sum` are collective.
    """

    states: Tensor
    index: Tensor
    count: int
    context: ContextGroup | None = None

    @classmethod
    def all(cls, states: Tensor) -> Rows:
        """Take states [N, H] of which this rank has all."""
        return cls(states, torch.arange(len(states), device=states.device), len(states))

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's part [n, ...] of values [N, ...] of all rows."""
        return values if self.context is None else values.index_select(0, self.index)

    def whole(self, values: Tensor) -> Tensor:
        """Return the values [N, ...] of all rows from this rank's [n, ...]."""
        if self.context is None:
            return values
        empty = values.new_zeros(self.count, *values.shape[1:])
        return self.context.summed(empty.index_copy(0, self.index, values))

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over all rows from the sum over this rank's."""
        return part if self.context is None else self.context.summed(part)


@dataclass(frozen=True)
class HiddenStates:
    """States `computed` [P, H], and `places` [B, T]: which of them each token has.

    Tokens of several sequences may have the same one, where these begin alike: its gradient is the
    sum of theirs. Past the end of a sequence `places` is 0, which nothing may read. With a
    `context`, `computed` are this rank's of the `positions` that its ranks divide.
    """

    computed: Tensor
    places: Tensor
    context: ContextGroup | None = None

    @classmethod
    def padded(cls, states: Tensor) -> HiddenStates:
        """Take states [B, T, H], one for each token."""
        count, longest = states.shape[:2]
        places = torch.arange(count * longest, device=states.device).view(count, longest)
        return cls(states.flatten(0, 1), places)

    def predicting(self, mask: Tensor) -> Rows:
        """Return the rows that predict the tokens where a mask [B, T - 1] is True.

        Position t of the mask is about token t + 1.
        """
        return self.rows(self.places[:, :-1][mask])

    def part(self, sequences: slice, longest: int) -> HiddenStates:
        """Return those of some sequences, of which the longest has so many tokens."""
        return HiddenStates(self.computed, self.places[sequences, :longest], self.context)

    def places_of(self, sequence: int, positions: Sequence[int]) -> Tensor:
        """Return the places [N] of some positions of a sequence, for `rows`."""
        return self.places[sequence, positions]

    def rows(self, places: Tensor) -> Rows:
        """Return the rows at some places [N]."""
        if self.context is None:
            return Rows.all(self.computed.index_select(0, places))
        own = self.context.own(len(self.computed) * self.context.size)
        index = ((places >= own.start) & (places < own.stop)).nonzero().squeeze(-1)
        states = self.computed.index_select(0, places[index] - own.start)
        return Rows(states, index, len(places), self.context)

    def whole(self) -> Tensor:
        """Return the states as [B, T, H]; what is past the end of a sequence has no meaning."""
        flat = self.rows(self.places.flatten())
        return flat.whole(flat.states).view(*self.places.shape, -1)


class PackedRow:
    """The lengths of the sequences in the only row of a forward; they add up to its tokens.

    With a `context` its ranks divide the row's positions.
    """

    __slots__ = ("context", "lengths")

    def __init__(self, lengths: Sequence[int], context: ContextGroup | None = None) -> None:
        self.lengths, self.context = list(lengths), context

    def chunks(self, size: int | None) -> list[int]:
        """Return the lengths of the sequences' chunks of a size, in order; None has no chunks."""
        if size is None:
            return self.lengths
        return [
            min(size, length - begin) for length in self.lengths for begin in range(0, length, size)
        ]


@dataclass(frozen=True)
class Packed:
    """The model's inputs `ids` and `positions` [R, L], and how to unpack its outputs.

    `places` [B, T] is where each token is among the R * L packed positions; `owners` [R, L] numbers
    the sequence at each position of the rows.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    owners: Tensor

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        device: torch.device,
        one_row: bool = False,
        context: ContextGroup | None = None,
    ) -> Packed:
        """Pack sequences into rows as long as the longest of them, or all into one row.

        One that the ranks of a `context` divide is padded to a length that they divide evenly.
        """
        lengths = [len(sequence) for sequence in sequences]
        rows = [list(range(len(lengths)))] if one_row else packed_rows(lengths)
        width, longest = (sum(lengths) if one_row else max(lengths)), max(lengths)
        width = width if context is None else context.padded(width)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        # The padding of a row is a separate sequence whose output is unused.
        positions = torch.arange(width).repeat(len(rows), 1)
        places = torch.zeros(len(sequences), longest, dtype=torch.long)
        owners = torch.full_like(ids, len(sequences))
        for number, row in enumerate(rows):
            ends = list(accumulate(lengths[index] for index in row))
            for index, end in zip(row, ends, strict=True):
                begin = end - lengths[index]
                ids[number, begin:end] = torch.as_tensor(sequences[index])
                owners[number, begin:end] = index
                positions[number, begin:] = torch.arange(width - begin)
                places[index, : end - begin] = number * width + torch.arange(begin, end)
            positions[number, ends[-1] :] = torch.arange(width - ends[-1])
        return cls(ids.to(device), positions.to(device), places.to(device), owners.to(device))

    @property
    def seen(self) -> Places:
        """What a position sees, as a tree of prefixes in which every sequence is a root."""
        return Places(self.owners, self.owners + 1, self.positions)

    def unpacked(self, states: Tensor, context: ContextGroup | None = None) -> HiddenStates:
        """Return the states [R, L, H], of a `context` this rank's, as those of the sequences."""
        return HiddenStates(states.flatten(0, 1), self.places, context)
