"""Delays updates of the weights until a version of them has been copied.

loop      hold(v) ......... copied(publish) --> handle
thread        forward, backward .... wait | update to v + 1
"""

import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class UpdateGate:
    """A gate that is held from one event loop and waited for in any thread."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._version = -1

    @property
    def held(self) -> bool:
        """Whether a version waits for its copy, or is being copied."""
        return not self._free.is_set()

    def hold(self, version: int) -> None:
        """Block updates until this version was copied."""
        self._version = version
        self._free.clear()

    async def copied(self, copy: Callable[[int], Awaitable[T]]) -> T:
        """Copy the held version, then release updates, also where the copy fails."""
        try:
            return await copy(self._version)
        finally:
            self._free.set()

    def wait(self) -> None:
        """Block this thread until no version is held."""
        self._free.wait()
