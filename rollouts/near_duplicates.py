"""Near-duplicate detection of texts by MinHash over character shingles.

The Jaccard similarity is estimated from `permutations` hash values with a standard error of at most
0.5 / sqrt(permutations). Hashes are fixed, so the same texts in the same order give the same
results on every machine.
"""

import zlib
from collections import deque
from itertools import count

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from composer_mesh.rollouts.tool_calls import normal_form

MISSED = 0.01
"""Largest probability that the index misses a text whose similarity equals the threshold."""
_CHUNK = 8192
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SCHEME = "affine32"


class NearDuplicates:
    """Index of the last `window` texts that were not near-duplicates of earlier ones."""

    def __init__(self, threshold: float, shingle: int, permutations: int, window: int) -> None:
        self._threshold, self._shingle, self._window = threshold, shingle, window
        self._empty = MinHash(permutations, seed=1, hashfunc=int, scheme=_SCHEME)
        shape = index_shape(threshold, permutations)
        self._index = MinHashLSH(threshold, permutations, params=shape)
        self._signatures: dict[int, MinHash] = {}
        self._order: deque[int] = deque()
        self._names = count()

    def seen(self, text: str, topic: bytes) -> bool:
        """Return whether a text is a near-duplicate within its topic; if not, index it."""
        signature = self._signature(text, topic)
        for name in self._index.query(signature):
            if signature.jaccard(self._signatures[name]) >= self._threshold:
                return True
        self._remember(signature)
        return False

    def _remember(self, signature: MinHash) -> None:
        if len(self._order) == self._window:
            oldest = self._order.popleft()
            self._index.remove(oldest)
            del self._signatures[oldest]
        name = next(self._names)
        self._index.insert(name, signature)
        self._signatures[name] = signature
        self._order.append(name)

    def _signature(self, text: str, topic: bytes) -> MinHash:
        signature: MinHash = self._empty.copy()
        found = shingles(text, self._shingle)
        for start in range(0, len(found), _CHUNK):
            signature.update_batch(found[start : start + _CHUNK].tolist())
        # Texts of different topics then share no hash value, so the index never compares them.
        signature.hashvalues ^= np.uint32(zlib.crc32(topic))
        return signature


def shingles(text: str, size: int) -> NDArray[np.uint32]:
    """Hash all runs of `size` characters; case and the amount of white space are ignored."""
    plain = " ".join(normal_form("NFKC", text).casefold().split())
    raw = plain.encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
    size = max(1, min(size, len(codes)))
    starts = len(codes) - size + 1
    hashes = np.zeros(starts, dtype=np.uint64)
    for offset in range(size if starts > 0 else 0):
        hashes = hashes * _BASE + codes[offset : offset + starts]
    return np.unique((hashes ^ (hashes >> np.uint64(32))).astype(np.uint32))


def index_shape(threshold: float, permutations: int) -> tuple[int, int]:
    """Return the bands and rows of the index: the fewest bands that miss at most `MISSED`.

    Two texts collide if all values of one band are equal: with b bands of r values, a pair of
    similarity t is missed with probability (1 - t^r)^b.
    """
    for rows in range(permutations // 2, 1, -1):
        bands = permutations // rows
        if (1 - threshold**rows) ** bands <= MISSED:
            return bands, rows
    return permutations, 1
