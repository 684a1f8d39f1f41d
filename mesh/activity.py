"""When an actor was working for the controller: busy intervals of each of its endpoints.

Calls of one actor and one endpoint that overlap are one interval. Only calls of this process are
seen; what actors ask of each other is not. Costs two dictionary operations a call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST = 5000
"""Ended intervals that are kept until they are taken; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class Busy:
    """An interval in which an actor had calls of an endpoint, in seconds since 1970."""

    actor: str
    endpoint: str
    began: float
    ended: float


@dataclass(slots=True)
class _Open:
    calls: int
    began: float


class ActivityLog:
    """Busy intervals of actors, on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._open: dict[tuple[str, str], _Open] = {}
        self._ended: deque[Busy] = deque(maxlen=MOST)

    @contextmanager
    def call(self, actor: str, endpoint: str) -> Iterator[None]:
        """Count a call for the length of a block."""
        key = (actor, endpoint)
        if (found := self._open.get(key)) is None:
            found = self._open[key] = _Open(0, self._clock())
        found.calls += 1
        try:
            yield
        finally:
            found.calls -= 1
            if not found.calls:
                del self._open[key]
                self._ended.append(Busy(*key, found.began, self._clock()))

    def take(self) -> list[Busy]:
        """Return the intervals since the last call; one that goes on is divided now."""
        now, ended = self._clock(), list(self._ended)
        self._ended.clear()
        for key, one in self._open.items():
            ended.append(Busy(*key, one.began, now))
            one.began = now
        return ended
