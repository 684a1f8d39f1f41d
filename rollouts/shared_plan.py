"""Grouping of sequences that begin alike into microbatches, so that most of it is computed once.

    units -> families: neighbours in the order of their ids -> parts that fit -> microbatches

A unit is what needs one forward together: a sample, or both sides of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from composer_mesh.rollouts.prefix_tree import (
    MIN_SHARED,
    ROOM,
    PrefixTree,
    shared_length,
    unique_ids,
)

Unit = Sequence[list[int]]
Shape = list[tuple[int, int]]
"""Rows and width of each level."""


@dataclass(frozen=True, slots=True)
class Part:
    """Indices of units that share a beginning, and the size of their forwards."""

    units: list[int]
    shape: Shape

    @property
    def tokens(self) -> int:
        """Number of positions that are computed, padding included."""
        return positions(self.shape)


def parts_of(units: Sequence[Unit], budget: int) -> list[Part]:
    """Divide units into parts that compute at most `budget` tokens; a larger unit is a part alone.

    What a family shares is computed again in each of its parts.
    """
    parts = []
    for family in families(units):
        for members in _fitting(units, family, budget):
            tree = PrefixTree.of([ids for index in members for ids in units[index]])
            parts.append(Part(members, [(level.rows, level.width) for level in tree.levels]))
    return parts


def families(units: Sequence[Unit]) -> list[list[int]]:
    """Group units that begin with `MIN_SHARED` ids or more in common, in the order of their ids."""
    order = sorted(range(len(units)), key=lambda index: units[index][0])
    found: list[list[int]] = []
    for index in order:
        if found and shared_length(units[found[-1][-1]][0], units[index][0]) >= MIN_SHARED:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def _fitting(units: Sequence[Unit], family: Sequence[int], budget: int) -> list[list[int]]:
    """Divide a family into runs of at most `budget` distinct tokens."""
    runs: list[list[int]] = []
    tokens = budget + 1
    for index in family:
        own = unique_ids(units[index])
        if runs:
            own -= shared_length(units[runs[-1][-1]][0], units[index][0])
        if tokens + own > budget:
            runs.append([])
            tokens, own = 0, unique_ids(units[index])
        runs[-1].append(index)
        tokens += own
    return runs


def shared_microbatches(parts: Sequence[Part], budget: int) -> list[list[int]]:
    """Group parts, by their indices, into microbatches of at most `budget` tokens: first fit.

    A part is not added where that pads more than `ROOM` tokens: a forward more costs less.
    """
    groups: list[_Group] = []
    for index in sorted(range(len(parts)), key=lambda index: (-parts[index].tokens, index)):
        if not any(group.take(index, parts[index], budget) for group in groups):
            groups.append(_Group([index], parts[index].shape))
    return [group.parts for group in groups]


def positions(shape: Shape) -> int:
    """Return the number of positions of rows, padded to the width of their level."""
    return sum(rows * width for rows, width in shape)


@dataclass
class _Group:
    """Parts of one microbatch: their rows are padded to the widest of each level."""

    parts: list[int]
    shape: Shape

    def take(self, index: int, part: Part, budget: int) -> bool:
        """Add a part, unless that would exceed the budget or pad too much."""
        levels = zip_longest(self.shape, part.shape, fillvalue=(0, 0))
        shape = [(one[0] + other[0], max(one[1], other[1])) for one, other in levels]
        tokens = positions(shape)
        if tokens > budget or tokens - positions(self.shape) - part.tokens > ROOM:
            return False
        self.parts.append(index)
        self.shape = shape
        return True
