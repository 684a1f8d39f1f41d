"""The requests of an engine that are neither answered nor aborted, by id.

An engine's thread answers them while other threads submit and abort: each ends exactly once.
"""

import threading
from typing import Generic, TypeVar

from composer_mesh.actors.engines.port import DuplicateRequest

T = TypeVar("T")


class OpenRequests(Generic[T]):
    """Entries by request id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, entry: T) -> None:
        """Enter a request; raises `DuplicateRequest` if its id is open."""
        with self._lock:
            if request_id in self._entries:
                raise DuplicateRequest(request_id)
            self._entries[request_id] = entry

    def abort(self, request_id: str) -> T | None:
        """Remove and return a request; None if it is not open."""
        with self._lock:
            return self._entries.pop(request_id, None)

    def answer(self, request_id: str, entry: T) -> bool:
        """Remove a request; False if it was aborted, also if its id is open again."""
        with self._lock:
            if self._entries.get(request_id) is not entry:
                return False
            del self._entries[request_id]
            return True
