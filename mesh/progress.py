"""How far the work of this process has come: reported by the code that works, read by `describe`.

    code that works -- made_progress("microbatch 3 of 8") --> PROGRESS --> describe --> deadlines

A process has one actor, so there is one counter, for all its work. A deadline bounds the time
without progress, so work reports each part that it completes: a microbatch, a decoding step, a
file. Any thread may report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProgressReport:
    """Progress of a process: what it completed last, and how long ago.

    `count` is the number of completed parts so far. `waits_for` names the other actors that the
    work waits for, empty where it does not wait.
    """

    count: int = 0
    last: str = ""
    age_s: float = 0.0
    waits_for: str = ""

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> ProgressReport | None:
        """Return the report within an answer of `describe`; None for one without."""
        found = about.get("progress")
        return None if found is None else cls(**found)

    def __str__(self) -> str:
        if not self.count:
            return "no part of its work was completed"
        waits = f", now waiting for {self.waits_for}" if self.waits_for else ""
        return f"last progress: {self.last}, {self.age_s:.0f} s before{waits}"


class Progress:
    """The completed parts of one process's work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = (0, "", clock())
        self._waits_for = ""

    @property
    def count(self) -> int:
        """Number of parts that were completed so far."""
        return self._last[0]

    def made(self, what: str) -> None:
        """Report a completed part, such as `microbatch 3 of 8`."""
        self._last = (self._last[0] + 1, what, self._clock())

    @contextmanager
    def waiting(self, others: str) -> Iterator[None]:
        """Report for the length of a block that the work waits for other actors."""
        self._waits_for = others
        try:
            yield
        finally:
            self._waits_for = ""

    def report(self) -> dict[str, Any]:
        """Return the fields of a `ProgressReport`, for `describe`."""
        count, last, at = self._last
        return asdict(ProgressReport(count, last, self._clock() - at, self._waits_for))


PROGRESS = Progress()
made_progress = PROGRESS.made
