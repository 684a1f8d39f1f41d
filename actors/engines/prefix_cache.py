"""Tracks the contents of the KV cache's rows, and assigns rows to new requests.

Rows of running requests come first, without gaps. The others keep the tokens of finished requests
until their row is needed: a prompt that shares a prefix with any row is computed from there on.
Cached prefixes are dropped when the weights change.
"""

from typing import Any

import numpy as np

from composer_mesh.actors.engines.kv_cache import RowCache

LEAST_SHARED = 8
"""A shorter common prefix is recomputed: copying it costs more."""

Ids = np.ndarray[Any, np.dtype[np.int64]]


class PrefixCache:
    """The token ids of every row; the KV cache holds all but the last of them."""

    def __init__(self, cache: RowCache, rows: int, length: int, *, sharing: bool) -> None:
        self._cache, self._sharing = cache, sharing
        self._ids = np.zeros((rows, length), dtype=np.int64)
        self._known = np.zeros(rows, dtype=np.int64)
        self._left = np.zeros(rows, dtype=np.int64)
        self._clock = 0

    @property
    def known(self) -> Ids:
        """Number of known ids of each row; 0 for an empty row."""
        return self._known

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

    def forget(self) -> None:
        """Empty all rows."""
        self._known[:] = 0
        self._left[:] = 0
        self._clock = 0

    def begin(self, row: int, ids: Ids) -> int:
        """Free a row for `ids`; return how many of their keys were reused.

        The row's contents move to the least recently finished row, unless `ids` continues them.
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
        """Copy to a running row the keys of `ids` that another row has; return how many."""
        source, shared = self.longest(ids)
        if shared:
            self._cache.copy(source, row, shared)
        return shared

    def longest(self, ids: Ids) -> tuple[int, int]:
        """Return the row that shares the longest prefix with `ids`, and its length."""
        if not self._sharing or len(ids) < LEAST_SHARED:
            return 0, 0
        same = self._ids[:, : len(ids)] == ids
        common = np.where(same.all(1), len(ids), same.argmin(1))
        common = np.minimum(common, self._known - 1)
        source = int(common.argmax())
        shared = int(common[source])
        return (source, shared) if shared >= LEAST_SHARED else (0, 0)

    def retire(self, row: int, last: int) -> None:
        """Retire a request: the last running row fills its gap, and its own row is cached."""
        self.exchange(row, last)
        self._clock += 1
        self._left[last] = self._clock

    def exchange(self, one: int, other: int) -> None:
        """Swap two rows."""
        if one == other:
            return
        self._cache.exchange(one, other, int(max(self._known[one], self._known[other])))
        pair, swapped = [one, other], [other, one]
        for held in (self._ids, self._known, self._left):
            held[pair] = held[swapped]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys of a duplicate prompt."""
        self._cache.copy(source, target, length)

    def _move(self, source: int, target: int) -> None:
        if self._known[source]:
            self._cache.copy(source, target, int(self._known[source]))
        for held in (self._ids, self._known, self._left):
            held[target] = held[source]
