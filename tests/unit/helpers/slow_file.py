"""A file that opens only once the event loop has turned: an audit hook lets its reader wait."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
"""What a loop that stands still is given before the file opens all the same."""


class SlowFile:
    """A regular file that opens after `turned`; `late` tells that nobody said so in time."""

    def __init__(self, path: Path) -> None:
        self._turned, self.late = threading.Event(), False
        _slow[str(path)] = self

    def turned(self) -> None:
        """Called by the event loop, which therefore goes on."""
        self._turned.set()

    def wait(self) -> None:
        self.late = not self._turned.wait(PATIENCE_S)


_slow: dict[str, SlowFile] = {}


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if event == "open" and _slow and (slow := _slow.pop(str(values[0]), None)):
        slow.wait()


sys.addaudithook(_hook)
