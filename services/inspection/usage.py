"""CPU usage of local processes between two measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CpuMeter(Generic[K]):
    """CPU usage of processes between two measurements, in percent of one core."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[K, tuple[float, float]] = {}

    def look(self, used: Mapping[K, float]) -> dict[K, float]:
        """Return the percentages since the last call, from each process's CPU seconds so far.

        Processes that were not in the last call are left out.
        """
        now, before = self._clock(), self._last
        self._last = {key: (now, seconds) for key, seconds in used.items()}
        return {
            key: round(100 * (seconds - before[key][1]) / (now - before[key][0]), 1)
            for key, seconds in used.items()
            if key in before
            and now > before[key][0]
            and seconds >= before[key][1]  # less: the pid was reused by another process
        }
