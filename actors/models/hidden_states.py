"""Last hidden states of several sequences, whichever way they were computed.

Axes: B sequences, T the length of the longest, N computed positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """States `computed` [N, H], and `places` [B, T]: which of them each token has.

    Tokens of several sequences may have the same one, where these begin alike: its gradient is the
    sum of theirs. Past the end of a sequence `places` is 0, which nothing may read.
    """

    computed: Tensor
    places: Tensor

    @classmethod
    def padded(cls, states: Tensor) -> HiddenStates:
        """Take states [B, T, H], one for each token."""
        count, longest = states.shape[:2]
        places = torch.arange(count * longest, device=states.device).view(count, longest)
        return cls(states.flatten(0, 1), places)

    def predicting(self, mask: Tensor) -> Tensor:
        """Return the states [n, H] that predict the tokens where a mask [B, T - 1] is True.

        Position t of the mask is about token t + 1.
        """
        return self.computed.index_select(0, self.places[:, :-1][mask])

    def part(self, sequences: slice, longest: int) -> HiddenStates:
        """Return those of some sequences, of which the longest has so many tokens."""
        return HiddenStates(self.computed, self.places[sequences, :longest])

    def of(self, sequence: int, positions: Sequence[int]) -> Tensor:
        """Return the states [n, H] of some positions of a sequence."""
        return self.computed.index_select(0, self.places[sequence, positions])

    def whole(self) -> Tensor:
        """Return the states as [B, T, H]; what is past the end of a sequence has no meaning."""
        return self.computed[self.places]
