"""What processes of this machine use of it, as `/proc` tells; nothing where there is none.

Only figures of one moment, or between two of them: nothing is kept or judged here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


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


class CpuMeter:
    """Percent of one core that processes have used between two looks."""

    def __init__(
        self,
        seconds_of: Callable[[int], float | None] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds_of, self._clock = seconds_of, clock
        self._last: dict[int, tuple[float, float]] = {}

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """Percent since the look before; processes that are seen for the first time have none."""
        now, found = self._clock(), {}
        seen: dict[int, tuple[float, float]] = {}
        for pid in pids:
            if (used := self._seconds_of(pid)) is None:
                continue
            seen[pid] = (now, used)
            before, used_before = self._last.get(pid, (now, used))
            if now > before and used >= used_before:  # less: another process has the number now
                found[pid] = round(100 * (used - used_before) / (now - before), 1)
        self._last = seen
        return found
