"""Sequences packed into the rows of one forward, each with its own positions from 0 on.

No token attends across a restart of positions: `packed_attention` computes each sequence by itself,
FlexAttention gets blocks, and otherwise transformers detects restarts, given no mask.
`rollouts.packing` decides the rows.

Axes: B sequences, T their padded length, R rows, L their length, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from composer_mesh.actors.models.context_parallel import ContextGroup
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.tree_masks import Places
from composer_mesh.rollouts.packing import packed_rows


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
    ) -> "Packed":
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
