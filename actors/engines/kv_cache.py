"""KV cache of running requests: one row each, `[layers, rows, kv_heads, length, head_dim]`.

`prefix_cache` tracks the contents of the rows, and keeps copies of their keys and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

States = tuple[Tensor, ...]
"""Keys and values of some tokens, and in a mixture their experts."""

KEYS_AND_VALUES = 2
EXPERT = torch.int16
"""Numbers of experts in the cache."""


def cut(states: States, start: int, end: int) -> States:
    """Return a copy of the states of tokens `start` to `end`."""
    return tuple(one[:, :, start:end].contiguous().clone() for one in states)


class RowCache:
    """`rows` sequences of at most `length` tokens; memory is allocated at the first write."""

    def __init__(self, layers: int, rows: int, length: int) -> None:
        self._layers, self._rows, self.length = layers, rows, length
        self._whole: tuple[Tensor, ...] = ()
        self._by_layer: list[tuple[Tensor, ...]] = []
        self._aimed = torch.zeros(2, 0, dtype=torch.long)
        self._flat: Tensor | None = None

    def aim(self, rows_and_positions: Tensor) -> None:
        """Set where the tokens of the next forward go: `[2, tokens]`, on the model's device."""
        self._aimed, self._flat = rows_and_positions, None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Store `[kv_heads, tokens, head_dim]` at the positions of `aim`; return the layer's rows.

        They are views `[rows, kv_heads, length, head_dim]`. Raises ValueError for a model whose
        layers differ in shape.
        """
        if not self._whole:
            self._allocate(keys, values)
        stored = self._by_layer[layer]
        index = self._index(len(keys))
        for new, held in zip((keys, values), stored, strict=True):
            if (new.shape[0], new.shape[2]) != (held.shape[1], held.shape[3]):
                raise ValueError(
                    f"layer {layer} has {new.shape[0]} key heads of width {new.shape[2]} and "
                    f"layer 0 has {held.shape[1]} of {held.shape[3]}, but rows have one shape"
                )
            rows = new.transpose(0, 1).reshape(-1, new.shape[2])
            held.view(-1, held.shape[3]).index_copy_(0, index, rows)
        return stored

    def write_experts(self, chosen: Tensor) -> None:
        """Store the experts `[tokens, layers, per_token]` of the forward at the positions of `aim`.

        They are copied, kept and restored like keys from then on.
        """
        if len(self._whole) == KEYS_AND_VALUES:
            _, layers, per_token = chosen.shape
            shape = (layers, self._rows, 1, self.length, per_token)
            self._whole += (torch.zeros(shape, dtype=EXPERT, device=chosen.device),)
        rows, positions = self._aimed
        self._whole[-1][:, rows, 0, positions] = chosen.transpose(0, 1).to(EXPERT)

    def experts(self, row: int, start: int, end: int) -> Tensor:
        """Return the experts of a row's tokens, `[end - start, layers, per_token]`, on the CPU."""
        return self._whole[-1][:, row, 0, start:end].transpose(0, 1).cpu()

    def clear(self, row: int) -> None:
        """Set a row to zeros; masked positions with NaN would make all attention over them NaN."""
        for held in self._whole:
            held[:, row] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` positions to another row."""
        for held in self._whole:
            held[:, target, :, :length] = held[:, source, :, :length]

    def read(self, row: int, start: int, end: int) -> States:
        """Return a copy of a row's keys and values, `[layers, kv_heads, end - start, head_dim]`."""
        return tuple(
            held[:, row, :, start:end].clone(memory_format=torch.contiguous_format)
            for held in self._whole
        )

    def restore(self, row: int, parts: Sequence[tuple[States, int]]) -> None:
        """Set the first positions of a row: of each part as many as it says, in order."""
        length = sum(count for _, count in parts)
        for number, held in enumerate(self._whole):
            states = [states[number][:, :, :count] for states, count in parts]
            torch.cat(states, dim=2, out=held[:, row, :, :length])

    def _allocate(self, *like: Tensor) -> None:
        def rows(states: Tensor) -> Any:
            heads, _, width = states.shape
            return states.new_zeros(self._layers, self._rows, heads, self.length, width)

        self._whole = tuple(rows(states) for states in like)
        self._by_layer = list(zip(*(held.unbind() for held in self._whole), strict=True))

    def _index(self, heads: int) -> Tensor:
        """Return each token head's flat index in a layer `[rows * heads * length, width]`."""
        if self._flat is None:
            rows, positions = self._aimed[:, :, None]
            head = torch.arange(heads, device=rows.device)
            self._flat = ((rows * heads + head) * self.length + positions).view(-1)
        return self._flat
