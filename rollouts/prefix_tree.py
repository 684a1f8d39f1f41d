"""Sequences as paths of a tree, whose shared beginnings are computed once.

    sequences of ids -> nodes (spans of ids) -> branches -> rows -> levels (one forward each)

With `Sharing` "row" all of a tree is one row of one level. Otherwise:

A node is a span of ids that follows the same ids in all its sequences. A branch is a small subtree
in one piece, or a node whose subtree is too large for that. Level 0 holds the roots, and each
further level continues the branches of the one before. Branches of one row follow the same row of
the level before, and do not see each other.

The last id of a span predicts a different next id in each of its sequences: losses read the same
position once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from composer_mesh.configs.trainer import Sharing

MIN_SHARED = 16
"""Ids that sequences share at least, to have a forward for them: a shorter span costs a forward
more than it saves. Within a branch of several nodes every shared id is computed once."""

WORTH = 0.9
"""Largest ratio of positions computed with sharing to those without at which it is used."""

ROW_CAPACITY = 512
"""Ids of a row of several nodes, which do not see each other: what attention computes of that is
lost, but a row so short costs less than the forward and the padding that it saves."""

ROW_SHARE = 4
"""A row of several nodes may exceed `ROW_CAPACITY` up to this part of what it follows."""

ONE_ROW = 1 << 62
"""The capacity for trees in one row, whose attention computes little of what a mask hides."""

WIDE = 4
"""Row capacities up to which the first level may have a mask, whose size is its width squared."""


@dataclass(slots=True, eq=False)
class Node:
    """A span of ids from position `start` on, at `offset` of its branch.

    Of the sequences in the order of their ids, those from `first` to before `last` pass through it.
    A node follows another one if it is further on and its `first` is among the other's sequences.
    """

    ids: list[int]
    start: int
    parent: Node | None = field(repr=False)
    branch: Branch = field(repr=False)
    offset: int
    first: int
    last: int

    @property
    def column(self) -> int:
        """Where it begins in the row of its branch."""
        return self.branch.column + self.offset

    def ancestors(self) -> Iterator[Node]:
        """Yield the nodes before it, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Branch:
    """Nodes side by side at `column` of a row of a level, each one's children right after it."""

    level: int
    parent: Node | None = field(repr=False)
    nodes: list[Node] = field(default_factory=list)
    row: int = 0
    column: int = 0

    @property
    def ids(self) -> int:
        """Number of ids of its nodes."""
        last = self.nodes[-1]
        return last.offset + len(last.ids)


@dataclass(slots=True)
class Level:
    """Branches in `rows` rows of one `width`; each row follows a row of the level before."""

    branches: list[Branch]
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

    @property
    def nodes(self) -> list[Node]:
        return [node for branch in self.branches for node in branch.nodes]

    @property
    def divides(self) -> bool:
        """Whether it has rows of several nodes, which do not all follow each other."""
        return sum(len(branch.nodes) for branch in self.branches) > self.rows

    def place(self, previous: Level | None, row_capacity: int) -> None:
        """Give each branch its row and column: the longest first, where it fits first."""
        siblings: dict[int, list[Branch]] = {}
        for number, branch in enumerate(self.branches):
            root = 0 if row_capacity == ONE_ROW else number
            follows = root if branch.parent is None else branch.parent.branch.row
            siblings.setdefault(follows, []).append(branch)
        for follows, branches in siblings.items():
            before = 0 if previous is None else previous.before[follows] + previous.ends[follows]
            branches.sort(key=lambda branch: -branch.ids)
            longest = _row_length(
                [one.ids for one in branches], row_capacity_after(before, row_capacity)
            )
            first = self.rows
            for branch in branches:
                self._place(branch, first, longest, follows, before)

    def _place(self, branch: Branch, first: int, longest: int, follows: int, before: int) -> None:
        """Place a branch in a row from `first` on where it fits, or in a new one."""
        size, rows = branch.ids, range(first, self.rows)
        fitting = (row for row in rows if self.ends[row] + size <= longest)
        if (row := next(fitting, None)) is None:
            row = self.rows
            self.follows.append(follows)
            self.before.append(before)
            self.ends.append(0)
        branch.row, branch.column = row, self.ends[row]
        self.ends[row] += size


def row_capacity_after(before: int, row_capacity: int) -> int:
    """Return how many ids a row of several nodes may have that follows so many others."""
    return max(row_capacity, before // ROW_SHARE)


def _row_length(sizes: Sequence[int], row_capacity: int) -> int:
    """Return the length of rows for branches, so that the last row is about as full as others."""
    total = sum(sizes)
    rows = max(1, -(-total // max(1, row_capacity, *sizes)))
    return max(*sizes, -(-total // rows))


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The nodes by level, and the last node of each sequence, in the order of the sequences."""

    levels: list[Level]
    leaves: list[Node]

    @classmethod
    def of(
        cls,
        sequences: Sequence[list[int]],
        shortest: int = MIN_SHARED,
        row_capacity: int | None = None,
    ) -> PrefixTree:
        """Share what at least two sequences begin with, in spans of at least `shortest` ids.

        Subtrees of at most `row_capacity` ids, by default `ROW_CAPACITY`, are in one piece.
        """
        order = sorted(range(len(sequences)), key=lambda index: sequences[index])
        ordered = [sequences[index] for index in order]
        row_capacity = ROW_CAPACITY if row_capacity is None else row_capacity
        building = _Building(ordered, shared_lengths(ordered), max(1, shortest), row_capacity)
        levels = building.levels()
        if levels[0].divides and levels[0].width > WIDE * row_capacity:
            levels = building.levels(divided_roots=False)
        leaves: list[Node | None] = [None] * len(sequences)
        for place, index in enumerate(order):
            leaves[index] = building.leaves[place]
        return cls(levels, [leaf for leaf in leaves if leaf is not None])

    @classmethod
    def planned(cls, sequences: Sequence[list[int]], sharing: Sharing) -> PrefixTree:
        """Share what pays: level by level, or everything in one row."""
        return cls.of(sequences, 1, ONE_ROW) if sharing == "row" else cls.of(sequences)

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
    row_capacity: int
    leaves: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = (len(ids) - alike for ids, alike in zip(self.ordered, self.shared, strict=True))
        self._own = [0, *accumulate(own)]
        """Ids of the sequences before each one that are not shared with the one before it."""

    def levels(self, divided_roots: bool = True) -> list[Level]:
        """Return the levels, each with its branches in rows; roots are divided only if wanted."""
        self._branches: list[list[Branch]] = []
        todo: list[_Neighbours] = [(0, len(self.ordered), 0, None)]
        while todo:
            todo.extend(self._split(*todo.pop(), divided_roots))
        levels: list[Level] = []
        for branches in self._branches:
            levels.append(Level(branches))
            levels[-1].place(levels[-2] if len(levels) > 1 else None, self.row_capacity)
        return levels

    def _split(
        self, low: int, high: int, start: int, parent: Node | None, divided_roots: bool
    ) -> list[_Neighbours]:
        """Add the branches of neighbours that share `start` ids; return what is split further."""
        rest: list[_Neighbours] = []
        divided = parent is not None or divided_roots
        row_capacity = row_capacity_after(start, self.row_capacity) if divided else 0
        for first, last in self._families(low, high, start, self.shortest):
            level = 0 if parent is None else parent.branch.level + 1
            branch = Branch(level, parent)
            if self._unique(first, last, start) <= row_capacity:
                self._grow(branch, first, last, start)
            else:
                rest += self._add(branch, (first, last, start, parent))
            while len(self._branches) <= level:
                self._branches.append([])
            self._branches[level].append(branch)
        return rest

    def _grow(self, branch: Branch, first: int, last: int, start: int) -> None:
        """Add the whole subtree of neighbours to a branch."""
        todo: list[_Neighbours] = [(first, last, start, branch.parent)]
        while todo:
            for low, high, end, node in self._add(branch, todo.pop()):
                families = list(self._families(low, high, end, 1))
                todo += [(one, other, end, node) for one, other in reversed(families)]

    def _add(self, branch: Branch, family: _Neighbours) -> list[_Neighbours]:
        """Add the node of what neighbours share to a branch; return those that extend past it."""
        first, last, start, parent = family
        end = min(self.shared[first + 1 : last], default=len(self.ordered[first]))
        ids = self.ordered[first][start:end]
        offset = branch.ids if branch.nodes else 0
        node = Node(ids, start, parent, branch, offset, first, last)
        branch.nodes.append(node)
        while first < last and len(self.ordered[first]) == end:
            self.leaves[first] = node
            first += 1
        return [(first, last, end, node)] if first < last else []

    def _families(self, low: int, high: int, start: int, least: int) -> Iterator[tuple[int, int]]:
        """Divide neighbours into runs that share `least` ids more, and single ones."""
        first = low
        for place in range(low + 1, high + 1):
            if place < high and self.shared[place] >= start + least:
                continue
            yield first, place
            first = place

    def _unique(self, first: int, last: int, start: int) -> int:
        """Return how many ids neighbours have from `start` on, of which shared ones count once."""
        return self._own[last] - self._own[first] + self.shared[first] - start
