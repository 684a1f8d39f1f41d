"""How long a host goes on without its controller: a lease, renewed by word and kept in a file.

The host's agent renews it when the controller asks; the worker, a process of its own that nothing
can hold up, looks whether it has run out. Both are processes of one machine and read one clock.
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
    """The lease of one worker, in a folder of its own."""

    folder: Path
    clock: Callable[[], float] = time.monotonic

    def renew(self, at: float | None = None) -> None:
        """The controller was there at a time of the clock; now, where none is said."""
        self._write(f"{self.clock() if at is None else at:.3f}")

    def end(self) -> None:
        """The run has ended: the host is not needed any more."""
        self._write(ENDED)

    @property
    def ended(self) -> bool:
        """Whether the controller has given the host back."""
        return self._read() == ENDED

    def age_s(self) -> float | None:
        """Seconds since it was renewed; None before the first time."""
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


class Beats:
    """Turns the beats of a controller into renewals of a lease.

    A beat counts from its arrival, but only once the controller says that it has heard the answer:
    where answers are lost on their way, it takes the host for lost, and so must the host itself.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._came: dict[int, float] = {}

    def came(self, number: int, heard: int) -> None:
        """A beat, and the last one whose answer the controller has; 0 is none yet."""
        now = self._lease.clock()
        self._came[number] = now
        self._came = {one: at for one, at in self._came.items() if one >= heard}
        if heard == 0 or heard in self._came:
            self._lease.renew(self._came.get(heard, now))
