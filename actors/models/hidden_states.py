"""Last hidden states of several sequences, whichever way they were computed.

Axes: B sequences, T the length of the longest, N selected rows, n those of them that this rank has,
P computed positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_mesh.actors.models.context_parallel import ContextGroup


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
