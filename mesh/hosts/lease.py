"""The lease of a host: how long it continues without its controller, stored in a file.

The host's agent renews it on the controller's beats; the worker, a separate process without
blocking work, checks whether it has expired. Both run on one machine and use the same clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LEASE_FILE = "lease"
ENDED = "ended"


@dataclass(frozen=True)
class Lease:
    """The lease of one worker, stored in its folder."""

    folder: Path
    clock: Callable[[], float] = time.monotonic

    def renew(self, at: float | None = None) -> None:
        """Renew the lease as of a time of the clock, by default now."""
        self._write(f"{self.clock() if at is None else at:.3f}")

    def end(self) -> None:
        """Mark the run as ended: the host is released."""
        self._write(ENDED)

    @property
    def ended(self) -> bool:
        """Whether the controller has released the host."""
        return self._read() == ENDED

    def age_s(self) -> float | None:
        """Seconds since the last renewal; None before the first."""
        said = self._read()
        if not said or said == ENDED:
            return None
        return max(0.0, self.clock() - float(said))

    def _write(self, text: str) -> None:
        draft = self.folder / f".{LEASE_FILE}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(self.folder / LEASE_FILE)

    def _read(self) -> str:
        try:
            return (self.folder / LEASE_FILE).read_text()
        except FileNotFoundError:
            return ""


class LeaseRenewal:
    """Renews a lease by the controller's beats.

    A beat counts from its arrival, but only once the controller reports that it received the
    answer: if answers are lost, the controller considers the host lost, and so must the host
    itself.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._came: dict[int, float] = {}

    def renew(self, number: int, heard: int) -> None:
        """Handle a beat; `heard` is the last one that the controller got an answer to, or 0."""
        now = self._lease.clock()
        self._came[number] = now
        self._came = {one: at for one, at in self._came.items() if one >= heard}
        if heard == 0 or heard in self._came:
            self._lease.renew(self._came.get(heard, now))
