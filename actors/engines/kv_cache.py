"""Keys and values of all running requests, one row each, rows kept without gaps.

A drop-in for transformers' caches: the engine points it at the rows and positions of the next
forward, and attention writes and reads there. Which request owns a row is the engine's business.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values: `[rows, kv_heads, length, head_dim]`."""

    is_compileable = False
    is_sliding = False

    def __init__(self, view: "SlotView", rows: int, length: int) -> None:
        super().__init__()
        self._view, self._rows, self._length = view, rows, length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads, head_dim = key_states.shape[1], key_states.shape[3]
        shape = (self._rows, heads, self._length, head_dim)
        self.keys: Tensor = key_states.new_zeros(shape)
        self.values: Tensor = value_states.new_zeros(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, view = self._view.rows, self._view
        index = torch.arange(rows.start, rows.stop)[:, None]
        self.keys[index, :, view.positions] = key_states.transpose(1, 2)
        self.values[index, :, view.positions] = value_states.transpose(1, 2)
        return self.keys[rows, :, : view.length], self.values[rows, :, : view.length]

    def move(self, source: int, target: int, length: int) -> None:
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002  an interface
        return self._view.length, 0

    def get_seq_length(self) -> int:
        return self._view.length

    def get_max_length(self) -> int:
        return self._length


class SlotView:
    """Which rows, positions `[rows, query]` and key length the next forward is about."""

    def __init__(self) -> None:
        self.rows = slice(0, 0)
        self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.length = 0


class SlotCache(Cache):
    """`rows` requests of at most `length` tokens each."""

    def __init__(self, layers: int, rows: int, length: int) -> None:
        self.view = SlotView()
        self._slots = [SlotLayer(self.view, rows, length) for _ in range(layers)]
        super().__init__(layers=list(self._slots))

    def move(self, source: int, target: int, length: int) -> None:
        """Copies a row's first `length` positions over another row."""
        for layer in self._slots:
            layer.move(source, target, length)
