"""Rate-limits events: at most one of a kind per interval, with a count of those suppressed.

Exact counts are in the metrics; this only keeps a burst of events from flooding the screen.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from composer_mesh.mesh.supervision import Recorder

INTERVAL_S = 1.0


class PacedEvents:
    """A rate-limiting recorder in front of another one. Not thread-safe."""

    def __init__(
        self,
        record: Recorder,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record, self._interval_s, self._clock = record, interval_s, clock
        self._last: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def __call__(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        """Record an event, or suppress and count it where one of its kind was recorded just now."""
        now = self._clock()
        if now - self._last.get(kind, -self._interval_s) < self._interval_s:
            self._held[kind] += 1
            return
        self._last[kind] = now
        held = self._held.pop(kind, 0)
        told = f"{detail} (and {held} more before it)" if held else detail
        self._record(kind, actor, told, **fields)

    def flush(self) -> None:
        """Record the counts of suppressed events."""
        for kind, held in self._held.items():
            self._record(kind, "", f"{held} more")
        self._held.clear()
