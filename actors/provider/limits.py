"""Limits when requests to one teacher may start: a rate per minute, and pauses.

The rate is a leaky bucket of `aiolimiter` that holds one request: no bursts, so no 60 seconds
contain more starts than the limit, also after a pause.
"""

import asyncio
import math

from aiolimiter import AsyncLimiter

MINUTE_S = 60.0
SPREAD = 0.25
"""Fraction of a pause over which unthrottled requests start after it."""
LEAST_SPACING_S = 1e-6


class StartLimiter:
    """Start limiter of the event loop that it is created in.

    `concurrency` is the maximum number of waiting requests; they are spread after a pause.
    """

    def __init__(self, per_minute: int | None, concurrency: int) -> None:
        self._concurrency, self._clock = concurrency, asyncio.get_running_loop().time
        self._rate = None if per_minute is None else AsyncLimiter(1, MINUTE_S / per_minute)
        self._paused_until = self._spread_until = -math.inf
        self._spread: AsyncLimiter | None = None

    @property
    def paused_s(self) -> float:
        """Seconds until requests may start again; 0 if they may."""
        return max(0.0, self._paused_until - self._clock())

    def pause(self, seconds: float) -> None:
        """Block all starts for some seconds; has no effect during a longer pause."""
        until = self._clock() + seconds
        if seconds > 0 and until > self._paused_until:
            spacing = max(SPREAD * seconds / self._concurrency, LEAST_SPACING_S)
            self._paused_until, self._spread_until = until, until + SPREAD * seconds
            self._spread = AsyncLimiter(1, spacing)

    async def acquire(self) -> None:
        """Wait until one request may start; a cancelled caller consumes no start."""
        may_start = False
        while not may_start:
            await asyncio.sleep(self.paused_s)
            if (limiter := self._limiter()) is not None:
                await limiter.acquire()
            may_start = not self.paused_s  # a pause may have started while this waited for the rate

    def _limiter(self) -> AsyncLimiter | None:
        if self._rate is not None:
            return self._rate
        return self._spread if self._clock() < self._spread_until else None
