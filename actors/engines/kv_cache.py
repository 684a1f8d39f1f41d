"""KV cache of running requests: one row each, `[layers, rows, kv_heads, length, head_dim]`.

`prefix_cache` tracks the contents of the rows, and keeps copies of their keys and values.

A radix tree from token sequences to cached values, bounded in tokens, least recently used first.

What sequences have in common is stored once. Values are opaque: they are cut like the sequences.
Knows neither tensors nor requests.

The contents of the KV cache's rows, and the keys and values kept for prompts to come.

Rows of running requests come first, without gaps. What has been computed is copied from the rows to
a radix tree of `capacity` tokens, least recently used first to go, so that a prompt is computed
from where it differs from every earlier one, whether those still run or not.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int64]]
V = TypeVar("V")
NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class _Node(Generic[V]):
    ids: Ids
    parent: "_Node[V] | None"
    used: int
    value: V | None = None
    """None while it is pending."""
    children: "dict[int, _Node[V]]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found(Generic[V]):
    """What is stored of a sequence: parts that are ready, then `pending` tokens without a value."""

    parts: list[tuple[V, int]]
    """Values, and how many of each one's tokens belong to the sequence."""
    pending: int

    @property
    def ready(self) -> int:
        """Number of tokens whose values are stored."""
        return sum(count for _, count in self.parts)


class RadixTree(Generic[V]):
    """Stores at most `capacity` tokens; nothing used since the last `tick` is evicted.

    `cut(value, start, end)` copies a part of a value.
    """

    def __init__(self, capacity: int, cut: Callable[[V, int, int], V]) -> None:
        self._capacity, self._cut = capacity, cut
        self.clear()

    def clear(self) -> None:
        """Remove everything."""
        self._root: _Node[V] = _Node(NONE, None, 0)
        self._leaves: list[tuple[int, int, _Node[V]]] = []
        self._period = self._queued = 0
        self.tokens = 0

    def tick(self) -> None:
        """Begin another period: what was used before may be evicted from now on."""
        self._period += 1

    def find(self, ids: Ids) -> Found[V]:
        """Return what is stored of a sequence, and mark it as used."""
        parts: list[tuple[V, int]] = []
        pending = 0
        for node, common in self._path(ids):
            if node.value is None:
                pending += common
            elif not pending:
                parts.append((node.value, common))
        return Found(parts, pending)

    def add(self, ids: Ids, read: Callable[[int, int], V] | None = None) -> None:
        """Store what a sequence adds, or as much of it as fits; `read(start, end)` returns values.

        Without `read` the values are pending until `fill`.
        """
        node, length = self._root, 0
        for found, common in self._path(ids):
            node = found if common == len(found.ids) else self._split(found, common)
            length += common
        rest = ids[length : length + self._make_place(len(ids) - length)]
        if len(rest):
            new = _Node(rest.copy(), node, self._period)
            if read is not None:
                new.value = read(length, length + len(rest))
            node.children[int(rest[0])] = new
            self.tokens += len(rest)
            self._queue(new)

    def fill(self, ids: Ids, read: Callable[[int, int], V]) -> None:
        """Set the values of a sequence that are pending."""
        at = 0
        for node, common in self._path(ids):
            if node.value is None and common == len(node.ids):
                node.value = read(at, at + common)
            at += common

    def _path(self, ids: Ids) -> Iterator[tuple[_Node[V], int]]:
        """Yield the nodes of a sequence, and how many of each one's ids it has.

        Nodes that it has as a whole are marked as used.
        """
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                return
            size = min(len(child.ids), len(ids) - at)
            same = child.ids[:size] == ids[at : at + size]
            common = size if same.all() else int(same.argmin())
            whole = common == len(child.ids)
            if whole:
                child.used = self._period
            yield child, common  # the caller may split it
            if not whole:
                return
            node, at = child, at + common

    def _split(self, node: _Node[V], at: int) -> _Node[V]:
        """Insert a node for the first `at` ids of another one; return it."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.ids[:at], parent, self._period)
        if node.value is not None:
            upper.value = self._cut(node.value, 0, at)
            node.value = self._cut(node.value, at, len(node.ids))
        parent.children[int(upper.ids[0])] = upper
        node.ids, node.parent = node.ids[at:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _make_place(self, tokens: int) -> int:
        """Evict leaves until so many tokens fit; return how many do."""
        while self.tokens + tokens > self._capacity and self._leaves:
            if self._leaves[0][0] >= self._period:
                break
            used, _, node = heapq.heappop(self._leaves)
            if node.parent is None:
                continue  # it was entered twice, and is removed already
            if node.used > used:
                self._queue(node)
            elif not node.children:
                self._remove(node)
        return max(0, min(tokens, self._capacity - self.tokens))

    def _remove(self, leaf: _Node[V]) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[int(leaf.ids[0])]
        leaf.parent = None
        self.tokens -= len(leaf.ids)
        if parent is not self._root and not parent.children:
            self._queue(parent)

    def _queue(self, leaf: _Node[V]) -> None:
        """Enter a leaf among those that may be evicted, by its last use."""
        self._queued += 1
        heapq.heappush(self._leaves, (leaf.used, self._queued, leaf))


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

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and in a mixture experts of all rows; none before the first write."""
        return self._whole

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

    def free(self) -> None:
        """Free the memory of all rows, which are allocated again by the next write."""
        self._whole, self._by_layer, self._flat = (), [], None

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


LEAST_SHARED = 8
"""A shorter common prefix is recomputed: copying it costs more."""

NOTHING: Found[States] = Found([], 0)


class PrefixCache:
    """The token ids of every running row; the KV cache holds all but the last of them.

    With `capacity` 0 nothing is kept.
    """

    def __init__(self, cache: RowCache, rows: int, length: int, capacity: int) -> None:
        self._cache, self.sharing = cache, capacity > 0
        self._ids = np.zeros((rows, length), dtype=np.int64)
        self._known = np.zeros(rows, dtype=np.int64)
        self._tree = RadixTree[States](capacity, cut)

    @property
    def known(self) -> Ids:
        """Number of known ids of each row; meaningless for rows that do not run."""
        return self._known

    @property
    def tokens(self) -> int:
        """Number of tokens that are kept."""
        return self._tree.tokens

    def ids(self, row: int) -> Ids:
        return self._ids[row, : self._known[row]]

    def newest(self, rows: int) -> Ids:
        """Return the last id of each of the first `rows` rows."""
        return self._ids[np.arange(rows), self._known[:rows] - 1]

    def put(self, row: int, ids: Ids) -> None:
        """Set a row's ids; the keys of the last one are not computed yet."""
        self._ids[row, : len(ids)] = ids
        self._known[row] = len(ids)

    def append(self, ids: list[int]) -> None:
        """Append one id to each of the first rows."""
        rows = np.arange(len(ids))
        self._ids[rows, self._known[: len(ids)]] = ids
        self._known[: len(ids)] += 1

    def move(self, source: int, target: int) -> None:
        """Move a row to another place."""
        if source != target:
            self._cache.copy(source, target, int(self._known[source]) - 1)
            self.put(target, self.ids(source))

    def drop(self) -> None:
        """Forget what is kept; rows stay as they are."""
        self._tree.clear()

    def tick(self) -> None:
        """Begin a step: what earlier steps used may be evicted from now on."""
        self._tree.tick()

    def find(self, ids: Ids) -> Found[States]:
        """Return the kept prefix of a sequence, and what the present step is about to compute."""
        if not self.sharing:
            return NOTHING
        found = self._tree.find(ids)
        pending = found.pending if found.pending >= LEAST_SHARED else 0
        return Found(found.parts if found.ready >= LEAST_SHARED else [], pending)

    def begin(self, row: int, ids: Ids, found: Found[States]) -> int:
        """Restore a row's keys, and announce that the present step computes the others of `ids`.

        Returns how many were restored. `computed` follows once they are there.
        """
        if found.parts:
            self._cache.restore(row, found.parts)
        self.announce(ids)
        return found.ready

    def announce(self, ids: Ids) -> None:
        """Announce that the present step computes what is not kept of `ids`."""
        if self.sharing:
            self._tree.add(ids)

    def computed(self, row: int, ids: Ids) -> None:
        """Copy to the tree what was announced and is computed now."""
        if self.sharing:
            self._tree.fill(ids, partial(self._cache.read, row))

    def keep(self, row: int) -> None:
        """Copy the keys of a row to the tree, as far as it has room."""
        if self.sharing:
            self._tree.add(self.ids(row)[:-1], partial(self._cache.read, row))
