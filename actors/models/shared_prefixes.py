"""Forward of sequences that begin alike: what they share is computed once, with its gradients.

    level 0 -- keys, values --> level 1 -- keys, values --> ...      one forward each

Rows hold branches of the tree, in which a position sees what comes before it on its path. A level's
forward reads the keys and values of those before it through autograd, so that one
backward gives a shared position the sum of the gradients of all its sequences.

Axes: R rows and L length of a level; P length of the levels before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.rollouts.prefix_tree import Branch, Level, PrefixTree

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
    first_columns: list[int] = []
    cached: Pairs = {}
    done = width = 0
    for number, level in enumerate(tree.levels):
        ids, positions = _rows(level, width)
        first_columns.append(width)
        places |= {
            id(node): done + branch.row * level.width + node.column
            for branch in level.branches
            for node in branch.nodes
        }
        inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device)}
        if number or level.divides:
            inputs["attention_mask"] = _mask(level, first_columns).to(device)
        cache = LevelCache(_followed(cached, level, tree.levels[number - 1] if number else None))
        computed.append(states_of(**inputs, past_key_values=cache).flatten(0, 1))
        cached, width, done = cache.after, width + level.width, done + ids.numel()
    return HiddenStates(torch.cat(computed), _places(tree, places).to(device))


def _followed(cached: Pairs, level: Level, before: Level | None) -> Pairs:
    """Return the keys and values that each row of a level follows."""
    if before is None or level.follows == list(range(before.rows)):
        return cached
    device = next(iter(cached.values()))[0].device
    rows = torch.tensor(level.follows, device=device)
    return {
        layer: (keys.index_select(0, rows), values.index_select(0, rows))
        for layer, (keys, values) in cached.items()
    }


def _rows(level: Level, before: int) -> tuple[Tensor, Tensor]:
    """Return a level's ids and positions [R, L]; those of padding are below `before` + L."""
    ids = torch.zeros(level.rows, level.width, dtype=torch.long)
    positions = torch.arange(before, before + level.width).repeat(level.rows, 1)
    for branch in level.branches:
        for node in branch.nodes:
            span = slice(node.column, node.column + len(node.ids))
            ids[branch.row, span] = torch.as_tensor(node.ids)
            positions[branch.row, span] = torch.arange(node.start, node.start + len(node.ids))
    return ids, positions


def _mask(level: Level, first_columns: Sequence[int]) -> Tensor:
    """Return which keys [R, 1, L, P + L] each position sees: its ancestors, and its node so far.

    Its first axis is 1 where all rows see alike.
    """
    rows: list[list[_Seen]] = [[] for _ in range(level.rows)]
    for branch in level.branches:
        rows[branch.row].append(_seen(branch, first_columns))
    if all(len(row) == 1 and row[0].is_path and row[0].before == rows[0][0].before for row in rows):
        rows = rows[:1]
    before, length = first_columns[-1], level.width
    mask = torch.zeros(len(rows), 1, length, before + length, dtype=torch.bool)
    for number, row in enumerate(rows):
        if len(row) == 1 and row[0].is_path:  # padding continues the only node
            _show(
                mask[number, 0],
                replace(row[0], first=0, ends=torch.full((length,), length)),
                before,
            )
            continue
        mask[number, 0, :, before:] = torch.eye(length, dtype=torch.bool)  # padding sees itself
        for seen in row:
            _show(mask[number, 0], seen, before)
    return mask


@dataclass(frozen=True)
class _Seen:
    """Where a branch begins in its row, and the columns of the nodes before it among all keys.

    A position at offset q of the branch sees offset k <= q where q < `ends[k]`: where what follows
    k's node ends.
    """

    first: int
    ends: Tensor
    is_path: bool
    before: list[tuple[int, int]]


def _seen(branch: Branch, first_columns: Sequence[int]) -> _Seen:
    above = [] if branch.parent is None else [branch.parent, *branch.parent.ancestors()]
    starts = [(first_columns[one.branch.level] + one.column, len(one.ids)) for one in above]
    stops = torch.tensor([node.stop for node in branch.nodes])
    lengths = torch.tensor([len(node.ids) for node in branch.nodes])
    ends = stops.repeat_interleave(lengths)
    return _Seen(branch.column, ends, len(branch.nodes) == 1, starts)


def _show(mask: Tensor, seen: _Seen, before: int) -> None:
    """Set what a branch's positions see in the mask [L, P + L] of its row."""
    count = len(seen.ends)
    own = slice(seen.first, seen.first + count)
    offsets = torch.arange(count)
    follows = offsets[:, None] < seen.ends[None, :]
    mask[own, before + seen.first : before + seen.first + count] = follows.tril()
    for column, length in seen.before:
        mask[own, column : column + length] = True


def _places(tree: PrefixTree, places: dict[int, int]) -> Tensor:
    """Return where each token [B, T] is among the computed positions; 0 past the end."""
    paths = [[leaf, *leaf.ancestors()][::-1] for leaf in tree.leaves]
    spans = [
        torch.cat([places[id(node)] + torch.arange(len(node.ids)) for node in path])
        for path in paths
    ]
    return torch.nn.utils.rnn.pad_sequence(spans, batch_first=True)
