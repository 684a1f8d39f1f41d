"""Last hidden states of several sequences, whichever way they were computed.

`shared_states` computes what sequences begin with in common once, with its gradients. `Packed` are
sequences packed into the rows of one forward, each with its own positions from 0 on.

No token attends across a restart of positions: `packed_attention` computes each sequence by itself,
FlexAttention gets blocks, and otherwise transformers detects restarts, given no mask.
`rollouts.packing` decides the rows.

Axes: B sequences, T the length of the longest, N selected rows, n those of them that this rank has,
P computed positions, R rows, L their length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_mesh.actors.models.expert_parallel import ContextGroup
from composer_mesh.actors.models.tree_masks import PADDING, Places, Windows, attention_masks
from composer_mesh.rollouts.packing import packed_rows
from composer_mesh.rollouts.prefix_tree import Branch, Level, PrefixTree


@dataclass(frozen=True)
class SelectedRows:
    """The `states` [n, H] of N selected rows that this rank has: all, without a `context`.

    `index` [n] says which of the N they are. With a context `whole` and `sum` are collective.
    """

    states: Tensor
    index: Tensor
    count: int
    context: ContextGroup | None = None

    @classmethod
    def all(cls, states: Tensor) -> SelectedRows:
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

    def predicting(self, mask: Tensor) -> SelectedRows:
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

    def rows(self, places: Tensor) -> SelectedRows:
        """Return the rows at some places [N]."""
        if self.context is None:
            return SelectedRows.all(self.computed.index_select(0, places))
        own = self.context.own(len(self.computed) * self.context.size)
        index = ((places >= own.start) & (places < own.stop)).nonzero().squeeze(-1)
        states = self.computed.index_select(0, places[index] - own.start)
        return SelectedRows(states, index, len(places), self.context)

    def whole(self) -> Tensor:
        """Return the states as [B, T, H]; what is past the end of a sequence has no meaning."""
        flat = self.rows(self.places.flatten())
        return flat.whole(flat.states).view(*self.places.shape, -1)


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
    ) -> Packed:
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

        level 0 -- keys, values --> level 1 -- keys, values --> ...

    Rows hold branches of the tree, in which a position sees what comes before it on its path. A
    level's forward reads the keys and values of those before it through autograd, so that one
    backward gives a shared position the sum of the gradients of all its sequences.
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

            inputs["cache"] = LevelCache(_followed(cached, level, tree, number))
        if number or level.divides:
            rows = _distinct_rows(level, device)
            query_rows, key_rows = (one.to(device).at(rows) for one in (queries, keys))
            inputs["attention_mask"] = attention_masks(query_rows, key_rows, windows, blocks)
        states = states_of(
            input_ids=ids.to(device), position_ids=queries.positions.to(device), **inputs
        )
        computed.append(states.flatten(0, 1))
        before, width, done = keys, width + level.width, done + ids.numel()
        if "cache" in inputs:
            cached = inputs["cache"].after
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
