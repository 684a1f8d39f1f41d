"""Grouping of sequences into microbatches and packed rows, from their lengths only."""

from collections.abc import Sequence
from dataclasses import dataclass, field


def microbatches(lengths: Sequence[int], budget: int, packed: bool = False) -> list[list[int]]:
    """Group indices so that rows times the longest row is at most `budget` tokens.

    A row is one sequence, or with `packed` as many as fit. Longest first; every index appears once.
    Raises ValueError for a sequence longer than the budget.
    """
    groups: list[Rows] = []
    check_fits(lengths, budget)
    for index in longest_first(lengths):
        # Packed rows have gaps that shorter sequences fill; unpacked rows have none.
        tried = groups if packed else groups[-1:]
        rows = next((rows for rows in tried if rows.take(index, lengths[index], budget)), None)
        if rows is None:
            groups.append(Rows(lengths[index], packed))
            groups[-1].take(index, lengths[index])
    return [rows.taken for rows in groups]


def check_fits(lengths: Sequence[int], budget: int) -> None:
    """Raise ValueError for a sequence longer than the budget."""
    longest = max(lengths, default=0)
    if longest > budget:
        raise ValueError(
            f"a sequence has {longest} tokens but a microbatch holds {budget}: raise "
            "trainer.microbatch_tokens or lower policy.max_context"
        )


def packed_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Pack indices into rows no longer than the longest sequence: first fit, longest first.

    These are the rows of one packed microbatch.
    """
    rows = Rows(max(lengths, default=0), packed=True)
    for index in longest_first(lengths):
        rows.take(index, lengths[index])
    return rows.rows


def spread(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divide indices into parts of about equal weight: heaviest first, to the lightest part.

    Indices stay in order within each part.
    """
    loads, shares = [0] * parts, [list[int]() for _ in range(parts)]
    for place in sorted(range(len(weights)), key=lambda place: (-weights[place], place)):
        part = min(range(parts), key=lambda part: (loads[part], part))
        loads[part] += weights[place]
        shares[part].append(place)
    return [sorted(share) for share in shares]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return indices from the longest to the shortest; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


@dataclass
class Rows:
    """Rows of one width being filled; `taken` lists the placed indices in insertion order."""

    width: int
    packed: bool
    rows: list[list[int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def take(self, index: int, length: int, budget: int | None = None) -> bool:
        """Place a sequence in a row; return False if that would exceed the token budget."""
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
