"""What processes have used of their machine between two looks; nothing is judged here."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CpuMeter(Generic[K]):
    """Percent of one core that processes have used between two looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[K, tuple[float, float]] = {}

    def look(self, used: Mapping[K, float]) -> dict[K, float]:
        """Percent since the look before, from the seconds that each process has used by now.

        Processes that were not in the look before have none.
        """
        now, before = self._clock(), self._last
        self._last = {key: (now, seconds) for key, seconds in used.items()}
        return {
            key: round(100 * (seconds - before[key][1]) / (now - before[key][0]), 1)
            for key, seconds in used.items()
            if key in before
            and now > before[key][0]
            and seconds >= before[key][1]  # less: another process has the number now
        }
