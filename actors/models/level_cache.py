"""Caches that a forward is given: the levels of a prefix tree before it, and a row's positions.

Imported where it is used, since transformers comes with it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

Pairs = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [R, heads, P, D] by the number of a layer."""


def cache_argument(decoder: Any, cache: Cache) -> dict[str, Cache]:
    """Return the keyword argument by which a decoder takes a cache, whose name has changed."""
    named = inspect.signature(decoder.forward).parameters
    return {"cache" if "cache" in named else "past_key_values": cache}


class LevelCache(Cache):
    """Keys and values of the levels before, which a forward reads and continues.

    Unlike transformers' own caches it may be written twice: a checkpointed layer runs again in the
    backward.
    """

    def __init__(self, before: Pairs) -> None:
        super().__init__(layers=[])
        self._before = before
        self.after: Pairs = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values with those before them."""
        if (before := self._before.get(layer_idx)) is not None:
            key_states = torch.cat([before[0], key_states], dim=-2)
            value_states = torch.cat([before[1], value_states], dim=-2)
        self.after[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions before, P."""
        before = self._before.get(layer_idx)
        return 0 if before is None else before[0].shape[-2]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` positions see, and the first one."""
        return self.get_seq_length(layer_idx) + query_length, 0


class RowPositions(Cache):
    """The `positions` [L] of a packed row for layers that would count along the row: keeps nothing.

    Llama 4 scales queries by their index in the row plus the length of the cache.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values."""
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> Tensor:
        """Return what is to be added to each index of the row [L], to give its position."""
        return self._offsets
