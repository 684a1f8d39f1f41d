"""Object stores in memory: one that works, and one that fails as clouds do, by a seed."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from composer_mesh.plugins.islands.store.opening import StoreUnavailable


class MemoryStore:
    """A store with conditional writes, for the threads of one test."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._alone = threading.Lock()

    def put_new(self, key: str, data: bytes) -> bool:
        with self._alone:
            if key in self.objects:
                return False
            self.objects[key] = bytes(data)
            return True

    def put(self, key: str, data: bytes) -> None:
        with self._alone:
            self.objects[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def size(self, key: str) -> int | None:
        data = self.objects.get(key)
        return None if data is None else len(data)

    def keys(self, prefix: str) -> Iterator[str]:
        with self._alone:
            found = sorted(key for key in self.objects if key.startswith(prefix))
        yield from found

    def delete(self, key: str) -> None:
        with self._alone:
            self.objects.pop(key, None)


class UnconditionalStore(MemoryStore):
    """A store that ignores the condition of a write, as some S3 servers do."""

    def put_new(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


@dataclass
class Faults:
    """Probabilities of what happens to an operation."""

    refused: float = 0.0
    """503 before anything is done."""
    lost_answer: float = 0.0
    """The write is done, but its answer is lost."""
    torn: float = 0.0
    """Half of a written object is stored, and the write fails."""
    torn_silently: float = 0.0
    """Half of a written object is stored, and the write succeeds."""
    stale_listing: float = 0.0
    """A listing shows none of the newest objects."""
    happened: Counter[str] = field(default_factory=Counter)


class KilledError(BaseException):
    """The process of an island is gone."""


class FaultyStore:
    """One island's view of a store; conditional writes stay conditional, even torn ones.

    Its user is killed, by `KilledError`, at the operation after `operations` of them.
    """

    def __init__(
        self, store: MemoryStore, faults: Faults, seed: int, operations: float = math.inf
    ) -> None:
        self._store, self.faults, self._random = store, faults, random.Random(seed)
        self._left, self.dead = operations, False

    def put_new(self, key: str, data: bytes) -> bool:
        return self._written(key, data, new=True)

    def put(self, key: str, data: bytes) -> None:
        self._written(key, data, new=False)

    def get(self, key: str) -> bytes | None:
        self._may_fail("read", key)
        return self._store.get(key)

    def size(self, key: str) -> int | None:
        self._may_fail("look at", key)
        return self._store.size(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._may_fail("list", prefix)
        found = list(self._store.keys(prefix))
        yield from found[: len(found) // 2] if self._draw("stale_listing") else found

    def delete(self, key: str) -> None:
        self._may_fail("delete", key)
        self._store.delete(key)

    def _written(self, key: str, data: bytes, new: bool) -> bool:
        self._may_fail("write", key)
        torn, silent = self._draw("torn"), self._draw("torn_silently")
        stored = data[: len(data) // 2] if torn or silent else data
        written = True
        if new:
            written = self._store.put_new(key, stored)
        else:
            self._store.put(key, stored)
        if torn or self._draw("lost_answer"):
            raise StoreUnavailable("write", key, "the connection broke")
        return written

    def _may_fail(self, operation: str, key: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise KilledError
        if self.dead or self._draw("refused"):
            raise StoreUnavailable(operation, key, "503 Slow Down")

    def _draw(self, name: str) -> bool:
        hit = self._random.random() < getattr(self.faults, name)
        self.faults.happened[name] += hit
        return hit
