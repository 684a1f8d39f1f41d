"""When the next request to one teacher may start: so many a minute, and none while it says wait.

A sliding window over the last starts, so that no 60 seconds hold more than the limit. Nothing
here waits or reads a clock; times are any seconds that only grow.
"""

import math
from collections import deque

WINDOW_S = 60.0


class Pace:
    """Gives each request its start, in the order in which they ask; `per_minute` None: at once.

    A start that was taken is used up, also where its request gives up waiting for it: that keeps
    the limit whatever the others were told.
    """

    def __init__(self, per_minute: int | None) -> None:
        if per_minute is not None and per_minute < 1:
            raise ValueError(f"per_minute is {per_minute}, below 1: no request could be sent")
        self._starts: deque[float] | None = None
        if per_minute is not None:
            self._starts = deque([-math.inf] * per_minute, maxlen=per_minute)
        self._held_until = -math.inf

    def next_start(self, now: float) -> float:
        """When a request that asks now would start."""
        oldest = -math.inf if self._starts is None else self._starts[0]
        return max(now, oldest + WINDOW_S, self._held_until)

    def take(self, now: float) -> float:
        """The start of one request: now or later."""
        start = self.next_start(now)
        if self._starts is not None:
            self._starts.append(start)
        return start

    def hold(self, until: float) -> None:
        """No request starts before this time."""
        self._held_until = max(self._held_until, until)

    @property
    def held_until(self) -> float:
        """For requests that were given a start before they were held."""
        return self._held_until
