"""Which sequences share a forward, and where packed ones lie in its rows.

Only lengths are known here; tensors and losses are the caller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def microbatches(lengths: Sequence[int], budget: int, packed: bool = False) -> list[list[int]]:
    """Indices grouped so that rows times longest row is at most `budget` tokens.

    A row is one sequence, or with `packed` as many as fit beside each other. Longest first; every
    index appears once. Raises ValueError for a sequence above the budget.
    """
    groups: list[Rows] = []
    for index in longest_first(lengths):
        if lengths[index] > budget:
            raise ValueError(
                f"a sequence has {lengths[index]} tokens but a microbatch holds {budget}: raise "
                "trainer.microbatch_tokens or lower policy.max_context"
            )
        # Packed rows have gaps that shorter ones fill; whole rows are full.
        tried = groups if packed else groups[-1:]
        rows = next((rows for rows in tried if rows.take(index, lengths[index], budget)), None)
        if rows is None:
            groups.append(Rows(lengths[index], packed))
            groups[-1].take(index, lengths[index])
    return [rows.taken for rows in groups]


def packed_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices by row, none longer than the longest sequence: first fit, the longest first.

    The sequences of one packed microbatch lie in these rows.
    """
    rows = Rows(max(lengths, default=0), packed=True)
    for index in longest_first(lengths):
        rows.take(index, lengths[index])
    return rows.rows


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices from the longest to the shortest; equal ones keep their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@dataclass
class Rows:
    """Rows of one width that fill up; `taken` is what lies in them, in the order of its coming."""

    width: int
    packed: bool
    rows: list[list[int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def take(self, index: int, length: int, budget: int | None = None) -> bool:
        """Find a sequence its place; False where that takes more tokens than the budget has."""
        place = next((row for row, free in enumerate(self.free) if free >= length), None)
        if place is None:
            if budget is not None and self.width * (len(self.rows) + 1) > budget:
                return False
            place = len(self.rows)
            self.rows.append([])
            self.free.append(self.width if self.packed else length)
        self.rows[place].append(index)
        self.free[place] -= length
        self.taken.append(index)
        return True
