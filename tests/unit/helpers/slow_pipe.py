"""A file that can only be read once the event loop has turned: a pipe, and who fills it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PATIENCE_S = 10.0
"""What a loop that stands still is given before the file is filled all the same."""


class SlowFile:
    """A pipe in place of a file. It is filled after `turned`; `late` tells that nobody said so."""

    def __init__(self, path: Path) -> None:
        self._path, self._content = path, path.read_bytes()
        self._turned, self.late = threading.Event(), False
        path.unlink()
        os.mkfifo(path)
        threading.Thread(target=self._fill, daemon=True).start()

    def turned(self) -> None:
        """Called by the event loop, which therefore goes on."""
        self._turned.set()

    def _fill(self) -> None:
        with self._path.open("wb") as pipe:  # waits for the reader
            self.late = not self._turned.wait(PATIENCE_S)
            pipe.write(self._content)
