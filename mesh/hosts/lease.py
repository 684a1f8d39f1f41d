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

    def renew(self) -> None:
        """The controller is there now."""
        self._write(f"{self.clock():.3f}")

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
