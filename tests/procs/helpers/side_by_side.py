"""Shared runs of a test session: each is made once, in a thread, while others are made and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

Make = Callable[["SideBySide", Path], Any]
"""Makes a run in an empty folder, perhaps of what another run gave; returns what tests read."""


class SideBySide:
    """Makes runs by name, several at one time, in the order in which they were started.

    A run that asks for the result of another must be started after it, so that no two wait for
    each other.
    """

    def __init__(self, makes: dict[str, Make], folder: Path, cache: Path, at_once: int) -> None:
        self.cache = cache
        self._makes, self._folder = makes, folder
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="shared-run")
        self._made: dict[str, Future[Any]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Begin to make runs that were not started yet."""
        for name in names:
            if name not in self._made:
                (self._folder / name).mkdir()
                make = self._makes[name]
                self._made[name] = self._threads.submit(make, self, self._folder / name)

    def result(self, name: str) -> Any:
        """What a run gave, once it is made; raises what its making raised, for each who asks."""
        self.start([name])
        return self._made[name].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
