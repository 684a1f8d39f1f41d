"""Forward of sequences that begin alike: what they share is computed once, with its gradients.

    level 0 -- keys, values --> level 1 -- keys, values --> ...      one forward each

Rows hold branches of the tree, in which a position sees what comes before it on its path. A level's
forward reads the keys and values of those before it through autograd, so that one
backward gives a shared position the sum of the gradients of all its sequences.

Axes: R rows and L length of a level; P length of the levels before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.tree_masks import PADDING, Places, Windows, attention_masks
from composer_mesh.rollouts.prefix_tree import Branch, Level, PrefixTree

if TYPE_CHECKING:  # brings transformers, which takes as long to import as torch
    from composer_mesh.actors.models.level_cache import Pairs

EVERYWHERE: Windows = {"full_attention": None}


def shared_states(
    states_of: Callable[..., Tensor],
    tree: PrefixTree,
    device: torch.device,
    windows: Windows = EVERYWHERE,
    blocks: bool = False,
) -> HiddenStates:
    """Return the states of a tree's sequences. `states_of` is the model's, [R, L, H] of ids [R, L].

    Runs one forward for each level. `windows` are those of the kinds of layers; masks are dense, or
    of `blocks` for FlexAttention.
    """
    begins: dict[int, int] = {}
    computed: list[Tensor] = []
    cached: Pairs = {}
    before: Places | None = None
    done = width = 0
    for number, level in enumerate(tree.levels):
        follows = torch.tensor(level.follows)
        ids, queries = _rows(level, width)
        begins |= {
            id(node): done + branch.row * level.width + node.column
            for branch in level.branches
            for node in branch.nodes
        }
        keys = queries if before is None else before.at(follows).then(queries)
        inputs: dict[str, Any] = {}
        if len(tree.levels) > 1:
            from composer_mesh.actors.models.level_cache import LevelCache

            inputs["past_key_values"] = LevelCache(_followed(cached, level, tree, number))
        if number or level.divides:
            rows = _distinct_rows(level, device)
            asked, seen = (one.to(device).at(rows) for one in (queries, keys))
            inputs["attention_mask"] = attention_masks(asked, seen, windows, blocks)
        states = states_of(
            input_ids=ids.to(device), position_ids=queries.positions.to(device), **inputs
        )
        computed.append(states.flatten(0, 1))
        before, width, done = keys, width + level.width, done + ids.numel()
        if "past_key_values" in inputs:
            cached = inputs["past_key_values"].after
    return HiddenStates(torch.cat(computed), _places(tree, begins).to(device))


def _followed(cached: Pairs, level: Level, tree: PrefixTree, number: int) -> Pairs:
    """Return the keys and values that each row of a level follows."""
    if not number or level.follows == list(range(tree.levels[number - 1].rows)):
        return cached
    device = next(iter(cached.values()))[0].device
    rows = torch.tensor(level.follows, device=device)
    return {
        layer: (keys.index_select(0, rows), values.index_select(0, rows))
        for layer, (keys, values) in cached.items()
    }


def _rows(level: Level, before: int) -> tuple[Tensor, Places]:
    """Return a level's ids [R, L] and their places; positions of padding are below `before` + L."""
    ids = torch.zeros(level.rows, level.width, dtype=torch.long)
    first, last = torch.full_like(ids, PADDING), torch.full_like(ids, PADDING + 1)
    positions = torch.arange(before, before + level.width).repeat(level.rows, 1)
    for branch in level.branches:
        for node in branch.nodes:
            span = branch.row, slice(node.column, node.column + len(node.ids))
            ids[span] = torch.as_tensor(node.ids)
            positions[span] = torch.arange(node.start, node.start + len(node.ids))
            first[span], last[span] = node.first, node.last
    return ids, Places(first, last, positions)


def _distinct_rows(level: Level, device: torch.device) -> Tensor:
    """Return the rows of a level that need masks of their own: the longest where all see alike.

    So they do where each is a single node after nodes at the same columns: what a shorter row sees
    past its end has no meaning.
    """
    paths = {_columns_before(branch) for branch in level.branches}
    alike = len(paths) == 1 and len(level.nodes) == level.rows
    longest = max(range(level.rows), key=lambda row: level.ends[row])
    return torch.tensor([longest] if alike else list(range(level.rows)), device=device)


def _columns_before(branch: Branch) -> tuple[tuple[int, int, int], ...]:
    """Return level, column and length of each node before a branch."""
    above = [] if branch.parent is None else [branch.parent, *branch.parent.ancestors()]
    return tuple((one.branch.level, one.column, len(one.ids)) for one in above)


def _places(tree: PrefixTree, begins: dict[int, int]) -> Tensor:
    """Return where each token [B, T] is among the computed positions; 0 past the end."""
    paths = [[leaf, *leaf.ancestors()][::-1] for leaf in tree.leaves]
    spans = [
        torch.cat([begins[id(node)] + torch.arange(len(node.ids)) for node in path])
        for path in paths
    ]
    return torch.nn.utils.rnn.pad_sequence(spans, batch_first=True)
