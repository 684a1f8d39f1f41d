"""What processes use of their machine: here as `/proc` tells, nothing where there is none.

Only figures of one moment, or between two of them: nothing is kept or judged here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def cpu_seconds(pid: int) -> float | None:
    """Seconds of CPU that a process has used since it began, in all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def resident_bytes(pid: int) -> int | None:
    """Memory of a process that is in RAM."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") or None
    except (OSError, IndexError, ValueError):
        return None


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
