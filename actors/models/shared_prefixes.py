"""Forward of sequences that begin alike: what they share is computed once, with its gradients.

    level 0 -- keys, values --> level 1 -- keys, values --> ...      one forward each

A level's forward reads the keys and values of those before it through autograd, so that one
backward gives a shared position the sum of the gradients of all its sequences.

Axes: R rows, one for each root; L length of a level's rows; P length of the levels before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.rollouts.prefix_tree import Node, PrefixTree

Pairs = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [R, heads, P, D] by the number of a layer."""


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


def shared_states(
    states_of: Callable[..., Tensor], tree: PrefixTree, device: torch.device
) -> HiddenStates:
    """Return the states of a tree's sequences. `states_of` is the model's, [R, L, H] of ids [R, L].

    Runs one forward for each level.
    """
    places: dict[int, int] = {}
    computed: list[Tensor] = []
    columns: dict[int, int] = {}
    cached: Pairs = {}
    done = width = 0
    for number, level in enumerate(tree.levels):
        ids, positions, starts = _rows(level, tree.rows)
        for node, start in zip(level, starts, strict=True):
            columns[id(node)] = width + start
            places[id(node)] = done + node.row * ids.shape[1] + start
        inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device)}
        if number:
            inputs["attention_mask"] = _mask(level, tree.rows, columns, width, ids).to(device)
        cache = LevelCache(cached)
        computed.append(states_of(**inputs, past_key_values=cache).flatten(0, 1))
        cached, width, done = cache.after, width + ids.shape[1], done + ids.numel()
    return HiddenStates(torch.cat(computed), _places(tree, places).to(device))


def _rows(level: Sequence[Node], rows: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return a level's ids and positions [R, L], and where each node begins in its row."""
    taken, starts = [0] * rows, []
    for node in level:
        starts.append(taken[node.row])
        taken[node.row] += len(node.ids)
    ids = torch.zeros(rows, max(taken), dtype=torch.long)
    positions = torch.zeros_like(ids)
    for node, start in zip(level, starts, strict=True):
        span = slice(start, start + len(node.ids))
        ids[node.row, span] = torch.as_tensor(node.ids)
        positions[node.row, span] = torch.arange(node.start, node.start + len(node.ids))
    if level[0].level == 0:  # one node a row: padding continues it, as causal attention allows
        positions = torch.arange(ids.shape[1]).expand(rows, -1)
    return ids, positions, starts


def _mask(
    level: Sequence[Node], rows: int, columns: dict[int, int], before: int, ids: Tensor
) -> Tensor:
    """Return which keys [R, 1, L, P + L] each position sees: its ancestors, and its node so far."""
    length = ids.shape[1]
    mask = torch.zeros(rows, 1, length, before + length, dtype=torch.bool)
    mask[:, 0, :, before:] = torch.eye(length, dtype=torch.bool)  # padding sees itself
    for node in level:
        column, count = columns[id(node)], len(node.ids)
        seen = mask[node.row, 0, column - before : column - before + count]
        seen[:, column : column + count] = torch.ones(count, count, dtype=torch.bool).tril()
        for one in node.ancestors():
            seen[:, columns[id(one)] : columns[id(one)] + len(one.ids)] = True
    return mask


def _places(tree: PrefixTree, places: dict[int, int]) -> Tensor:
    """Return where each token [B, T] is among the computed positions; 0 past the end."""
    paths = [[leaf, *leaf.ancestors()][::-1] for leaf in tree.leaves]
    spans = [
        torch.cat([places[id(node)] + torch.arange(len(node.ids)) for node in path])
        for path in paths
    ]
    return torch.nn.utils.rnn.pad_sequence(spans, batch_first=True)
