"""Sequences as paths of a tree, whose shared beginnings are computed once.

    sequences of ids -> nodes (spans of ids) -> levels: what one forward computes

A node is a span of ids that follows the same ids in all its sequences. Level 0 holds the roots, and
each further level continues the nodes of the one before. The last id of a span predicts a different
next id in each of its sequences: losses read the same position once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MIN_SHARED = 16
"""Ids that sequences share at least, to be a node of their own: a shorter span costs a forward
more than it saves."""

WORTH = 0.9
"""Largest ratio of positions computed with sharing to those without at which it is used."""


@dataclass(slots=True)
class Node:
    """A span of ids from position `start` on; `row` numbers the root that it descends from."""

    ids: list[int]
    start: int
    level: int
    row: int
    parent: Node | None = field(repr=False)

    def ancestors(self) -> Iterator[Node]:
        """Yield the nodes before it, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The nodes by level, and the last node of each sequence, in the order of the sequences."""

    levels: list[list[Node]]
    leaves: list[Node]

    @classmethod
    def of(cls, sequences: Sequence[list[int]], shortest: int = MIN_SHARED) -> PrefixTree:
        """Share what at least two sequences begin with, in spans of at least `shortest` ids."""
        order = sorted(range(len(sequences)), key=lambda index: sequences[index])
        ordered = [sequences[index] for index in order]
        building = _Building(ordered, shared_lengths(ordered), max(1, shortest))
        building.run()
        leaves: list[Node | None] = [None] * len(sequences)
        for place, index in enumerate(order):
            leaves[index] = building.leaves[place]
        return cls(building.levels, [leaf for leaf in leaves if leaf is not None])

    @property
    def rows(self) -> int:
        """Number of roots: sequences of different rows share nothing."""
        return len(self.levels[0])

    @property
    def ids(self) -> int:
        """Number of ids of all nodes."""
        return sum(len(node.ids) for level in self.levels for node in level)

    @property
    def computed(self) -> int:
        """Number of positions that the forwards compute, padding included."""
        return sum(self.rows * width for width in self.widths())

    @property
    def pays(self) -> bool:
        """Whether the forwards compute clearly less than one of the padded sequences would."""
        lengths = [leaf.start + len(leaf.ids) for leaf in self.leaves]
        return self.computed <= WORTH * len(lengths) * max(lengths)

    @property
    def forwards(self) -> int:
        """Number of forwards of the model that compute it: one where sharing does not pay."""
        return len(self.levels) if self.pays else 1

    def widths(self) -> list[int]:
        """Return the length of each level's rows: the nodes of a level follow one another."""
        return [max(row_lengths(level, self.rows)) for level in self.levels]


def row_lengths(level: Sequence[Node], rows: int) -> list[int]:
    """Return the number of ids that each row has at a level."""
    lengths = [0] * rows
    for node in level:
        lengths[node.row] += len(node.ids)
    return lengths


def shared_lengths(ordered: Sequence[list[int]]) -> list[int]:
    """Return how many ids each of some sorted sequences begins with like the one before it."""
    return [0, *(shared_length(before, after) for before, after in pairwise(ordered))]


def unique_ids(sequences: Sequence[list[int]]) -> int:
    """Return the number of ids of sequences whose shared beginnings count once."""
    ordered = sorted(sequences)
    return sum(map(len, ordered)) - sum(shared_lengths(ordered))


def shared_length(one: list[int], other: list[int]) -> int:
    """Return how many ids two sequences begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_Neighbours = tuple[int, int, int, Node | None]
"""A run of sorted sequences, from and to, that share so many ids, and the node of these."""


@dataclass
class _Building:
    """A tree of sorted sequences, of which those that share a beginning are neighbours."""

    ordered: Sequence[list[int]]
    shared: list[int]
    shortest: int
    levels: list[list[Node]] = field(default_factory=list)
    leaves: dict[int, Node] = field(default_factory=dict)

    def run(self) -> None:
        todo: list[_Neighbours] = [(0, len(self.ordered), 0, None)]
        while todo:
            todo.extend(self._split(*todo.pop()))

    def _split(self, low: int, high: int, start: int, parent: Node | None) -> list[_Neighbours]:
        """Add the nodes of neighbours that share `start` ids; return those to be split further."""
        rest: list[_Neighbours] = []
        for first, last in self._families(low, high, start):
            end = min(self.shared[first + 1 : last], default=len(self.ordered[first]))
            node = self._node(first, start, end, parent)
            done = first
            while done < last and len(self.ordered[done]) == end:
                self.leaves[done] = node
                done += 1
            if done < last:
                rest.append((done, last, end, node))
        return rest

    def _families(self, low: int, high: int, start: int) -> Iterator[tuple[int, int]]:
        """Divide neighbours into runs that share `shortest` ids more, and single ones."""
        first = low
        for place in range(low + 1, high + 1):
            if place < high and self.shared[place] >= start + self.shortest:
                continue
            yield first, place
            first = place

    def _node(self, place: int, start: int, end: int, parent: Node | None) -> Node:
        level = 0 if parent is None else parent.level + 1
        while len(self.levels) <= level:
            self.levels.append([])
        row = len(self.levels[0]) if parent is None else parent.row
        node = Node(self.ordered[place][start:end], start, level, row, parent)
        self.levels[level].append(node)
        return node
