"""A radix tree from token sequences to cached values, bounded in tokens, least recently used first.

What sequences have in common is stored once. Values are opaque: they are cut like the sequences.
Knows neither tensors nor requests.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

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
