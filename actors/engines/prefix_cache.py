"""The contents of the KV cache's rows, and the keys and values kept for prompts to come.

Rows of running requests come first, without gaps. What has been computed is copied from the rows to
a radix tree of `capacity` tokens, least recently used first to go, so that a prompt is computed
from where it differs from every earlier one, whether those still run or not.
"""

from functools import partial

import numpy as np

from composer_mesh.actors.engines.kv_cache import RowCache, States, cut
from composer_mesh.actors.engines.radix_tree import Found, Ids, RadixTree

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

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys of a duplicate prompt."""
        self._cache.copy(source, target, length)

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
