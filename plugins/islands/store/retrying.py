"""A store whose operations are tried again for some seconds, and whose traffic is counted."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from composer_mesh.plugins.islands.store.port import ObjectStore, StoreUnavailable

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes of the objects sent and received, and operations that were tried again."""

    sent: int = 0
    received: int = 0
    retries: int = 0


class RetryingStore:
    """Tries each operation again until `patience_s` have passed, then raises its error.

    A conditional write that is tried again may find its own object: False then says only that the
    key exists.
    """

    def __init__(
        self,
        store: ObjectStore,
        patience_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._patience_s, self._sleep = store, patience_s, sleep
        self.traffic = Traffic()

    def put_new(self, key: str, data: bytes) -> bool:
        written = self._insist(lambda: self._store.put_new(key, data))
        self.traffic.sent += len(data)
        return written

    def put(self, key: str, data: bytes) -> None:
        self._insist(lambda: self._store.put(key, data))
        self.traffic.sent += len(data)

    def get(self, key: str) -> bytes | None:
        data = self._insist(lambda: self._store.get(key))
        self.traffic.received += len(data or b"")
        return data

    def size(self, key: str) -> int | None:
        return self._insist(lambda: self._store.size(key))

    def keys(self, prefix: str) -> Iterator[str]:
        yield from self._insist(lambda: list(self._store.keys(prefix)))

    def delete(self, key: str) -> None:
        self._insist(lambda: self._store.delete(key))

    def _insist(self, work: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(self._patience_s),
            sleep=self._sleep,
            before_sleep=lambda _: self._count(),
            reraise=True,
        )
        return retrying(work)

    def _count(self) -> None:
        self.traffic.retries += 1
