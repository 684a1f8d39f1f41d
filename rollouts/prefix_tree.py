"""Sequences as paths of a tree, whose shared beginnings are computed once.

    sequences of ids -> nodes (spans of ids) -> levels: what one forward computes

A node is a span of ids that follows the same ids in all its sequences. Level 0 holds the roots, and
each further level continues the nodes of the one before. Nodes of one row follow the same row of
the level before, and do not see each other; a row is short beside what it follows.

The last id of a span predicts a different next id in each of its sequences: losses read the same
position once for each.
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


ROW_SHARE = 4
"""A row of several nodes is no longer than the longest of them, or this part of what it follows:
they do not see each other, so what attention computes of that is lost."""


@dataclass(slots=True)
class Node:
    """A span of ids from position `start` on, at `column` of a row of its level."""

    ids: list[int]
    start: int
    level: int
    parent: Node | None = field(repr=False)
    row: int = 0
    column: int = 0

    def ancestors(self) -> Iterator[Node]:
        """Yield the nodes before it, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Level:
    """Nodes in `rows` rows of one `width`; each row follows a row of the level before."""

    nodes: list[Node]
    follows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """Ids before each row, in the rows that it follows."""

    @property
    def rows(self) -> int:
        return len(self.ends)

    @property
    def width(self) -> int:
        return max(self.ends)

    def place(self, previous: Level | None) -> None:
        """Give each node its row and column: the longest first, where it fits first."""
        siblings: dict[int, list[Node]] = {}
        for number, node in enumerate(self.nodes):
            follows = number if node.parent is None else node.parent.row
            siblings.setdefault(follows, []).append(node)
        for follows, nodes in siblings.items():
            before = 0 if previous is None else previous.before[follows] + previous.ends[follows]
            nodes.sort(key=lambda node: -len(node.ids))
            longest, first = max(len(nodes[0].ids), before // ROW_SHARE), self.rows
            for node in nodes:
                self._place(node, first, longest, follows, before)

    def _place(self, node: Node, first: int, longest: int, follows: int, before: int) -> None:
        """Place a node in a row from `first` on where it fits, or in a new one."""
        rows = range(first, self.rows)
        fitting = (row for row in rows if self.ends[row] + len(node.ids) <= longest)
        if (row := next(fitting, None)) is None:
            row = self.rows
            self.follows.append(follows)
            self.before.append(before)
            self.ends.append(0)
        node.row, node.column = row, self.ends[row]
        self.ends[row] += len(node.ids)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The nodes by level, and the last node of each sequence, in the order of the sequences."""

    levels: list[Level]
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
        return cls(building.placed(), [leaf for leaf in leaves if leaf is not None])

    @property
    def ids(self) -> int:
        """Number of ids of all nodes."""
        return sum(sum(level.ends) for level in self.levels)

    @property
    def computed(self) -> int:
        """Number of positions that the forwards compute, padding included."""
        return sum(level.rows * level.width for level in self.levels)

    @property
    def pays(self) -> bool:
        """Whether the forwards compute clearly less than one of the padded sequences would."""
        lengths = [leaf.start + len(leaf.ids) for leaf in self.leaves]
        return self.computed <= WORTH * len(lengths) * max(lengths)

    @property
    def forwards(self) -> int:
        """Number of forwards of the model that compute it: one where sharing does not pay."""
        return len(self.levels) if self.pays else 1


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
    """The nodes of each level."""
    leaves: dict[int, Node] = field(default_factory=dict)

    def run(self) -> None:
        todo: list[_Neighbours] = [(0, len(self.ordered), 0, None)]
        while todo:
            todo.extend(self._split(*todo.pop()))

    def placed(self) -> list[Level]:
        """Return the levels, each with its nodes in rows."""
        levels: list[Level] = []
        for nodes in self.levels:
            levels.append(Level(nodes))
            levels[-1].place(levels[-2] if len(levels) > 1 else None)
        return levels

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
        node = Node(self.ordered[place][start:end], start, level, parent)
        self.levels[level].append(node)
        return node
