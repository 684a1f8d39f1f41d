"""Sequences laid into the rows of one forward, each with positions of its own from 0 on.

A model that is told positions and no mask lets no token attend across a restart: transformers
finds the restarts by itself, for every attention that it has. Which rows there are is decided in
`rollouts.packing`; nothing here runs a model.

Axes: B sequences, T their padded length, R rows, L their length, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from composer_mesh.rollouts.packing import packed_rows


@dataclass(frozen=True)
class Packed:
    """What the model gets, `ids` and `positions` [R, L], and the way back.

    The N tokens lie at `places` of the R * L that the model sees, and at `wanted` of B * T.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    wanted: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], device: torch.device, one_row: bool = False
    ) -> "Packed":
        """Lay sequences into rows as long as the longest of them, or all into one row."""
        lengths = [len(sequence) for sequence in sequences]
        rows = [list(range(len(lengths)))] if one_row else packed_rows(lengths)
        width, longest = (sum(lengths) if one_row else max(lengths)), max(lengths)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        # The tail of a row is a sequence like any other, which nobody reads.
        positions = torch.arange(width).repeat(len(rows), 1)
        places, wanted = [], []
        for number, row in enumerate(rows):
            ends = list(accumulate(lengths[index] for index in row))
            for index, end in zip(row, ends, strict=True):
                begin = end - lengths[index]
                ids[number, begin:end] = torch.as_tensor(sequences[index])
                positions[number, begin:] = torch.arange(width - begin)
                places.append(number * width + torch.arange(begin, end))
                wanted.append(index * longest + torch.arange(lengths[index]))
            positions[number, ends[-1] :] = torch.arange(width - ends[-1])
        return cls(
            ids.to(device),
            positions.to(device),
            torch.cat(places).to(device),
            torch.cat(wanted).to(device),
            (len(sequences), longest),
        )

    def unpacked(self, states: Tensor) -> Tensor:
        """Hidden states [R, L, H] as those [B, T, H] of padded sequences; 0 where there is none."""
        flat = states.flatten(0, 1)
        found = flat.new_zeros(self.shape[0] * self.shape[1], flat.shape[-1])
        return found.index_copy(0, self.wanted, flat[self.places]).view(*self.shape, -1)
