"""What each row of the cache holds, and which row a new request gets.

Rows of running requests come first, without gaps. The others keep what finished requests have left,
as long as nobody needs the room: a prompt that begins like any row is computed from there on.
Nothing here computes keys, and nothing outlives the weights they were computed with.
"""

from typing import Any

import numpy as np

from composer_mesh.actors.engines.kv_cache import RowCache

LEAST_SHARED = 8
"""A shorter common beginning is computed again: a copy costs more."""

Ids = np.ndarray[Any, np.dtype[np.int64]]


class PrefixCache:
    """The ids of every row; the cache holds all but the last of them."""

    def __init__(self, cache: RowCache, rows: int, length: int, *, sharing: bool) -> None:
        self._cache, self._sharing = cache, sharing
        self._ids = np.zeros((rows, length), dtype=np.int64)
        self._known = np.zeros(rows, dtype=np.int64)
        self._left = np.zeros(rows, dtype=np.int64)
        self._clock = 0

    @property
    def known(self) -> Ids:
        """How many ids of each row are known; 0 for a row that holds nothing."""
        return self._known

    def ids(self, row: int) -> Ids:
        return self._ids[row, : self._known[row]]

    def newest(self, rows: int) -> Ids:
        """The last id of each of the first `rows` rows."""
        return self._ids[np.arange(rows), self._known[:rows] - 1]

    def put(self, row: int, ids: Ids) -> None:
        """A row now holds these, the last one's keys not yet."""
        self._ids[row, : len(ids)] = ids
        self._known[row] = len(ids)

    def append(self, ids: list[int]) -> None:
        """One more id for each of the first rows."""
        rows = np.arange(len(ids))
        self._ids[rows, self._known[: len(ids)]] = ids
        self._known[: len(ids)] += 1

    def forget(self) -> None:
        """No row holds anything any more."""
        self._known[:] = 0
        self._left[:] = 0
        self._clock = 0

    def begin(self, row: int, ids: Ids) -> int:
        """Makes a row free for `ids`; returns how many of their keys it has been given.

        What the row held moves to the row that was left the longest time ago, unless `ids` goes on
        from it.
        """
        source, shared = self.longest(ids)
        victim = row + int(self._left[row:].argmin())
        if shared and source >= row and (source == victim or shared == self._known[source] - 1):
            self.exchange(source, row)
        else:
            if victim != row:
                self._move(row, victim)
            if shared and source != row:
                self._cache.copy(source, row, shared)
        self._known[row] = 0
        return shared

    def resume(self, row: int, ids: Ids) -> int:
        """Gives a running row the keys of `ids` that another row has; returns how many."""
        source, shared = self.longest(ids)
        if shared:
            self._cache.copy(source, row, shared)
        return shared

    def longest(self, ids: Ids) -> tuple[int, int]:
        """The row that has the most keys of the beginning of `ids`, and how many."""
        if not self._sharing or len(ids) < LEAST_SHARED:
            return 0, 0
        same = self._ids[:, : len(ids)] == ids
        common = np.where(same.all(1), len(ids), same.argmin(1))
        common = np.minimum(common, self._known - 1)
        source = int(common.argmax())
        shared = int(common[source])
        return (source, shared) if shared >= LEAST_SHARED else (0, 0)

    def retire(self, row: int, last: int) -> None:
        """A request is done: the last running row closes its gap, and its own row is kept."""
        self.exchange(row, last)
        self._clock += 1
        self._left[last] = self._clock

    def exchange(self, one: int, other: int) -> None:
        """Two rows change places."""
        if one == other:
            return
        self._cache.exchange(one, other, int(max(self._known[one], self._known[other])))
        pair, swapped = [one, other], [other, one]
        for held in (self._ids, self._known, self._left):
            held[pair] = held[swapped]

    def copy(self, source: int, target: int, length: int) -> None:
        """The keys of a twin."""
        self._cache.copy(source, target, length)

    def _move(self, source: int, target: int) -> None:
        if self._known[source]:
            self._cache.copy(source, target, int(self._known[source]))
        for held in (self._ids, self._known, self._left):
            held[target] = held[source]
