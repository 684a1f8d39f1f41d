"""What the page keeps of the runs that were looked at last: columns, events, timeline, live mesh.

Files are read on from where they were read last. Each part is bounded, and so is the number of
runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_mesh.configs.regular_files import UnusableFile
from composer_mesh.plugins.dashboard.series import Columns
from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.directory.report import TIMELINE_FILE
from composer_mesh.services.directory.status import EVENTS_FILE, RunUnavailable
from composer_mesh.services.inspection.events_command import FollowedLines, event_of
from composer_mesh.services.inspection.tree import MESH_CHANGES, Viewer

RUNS_KEPT = 12
EVENTS_KEPT = 5000
STEPS_KEPT = 64
LOOK_S, LONGEST_LOOK_S = 1.5, 10.0
"""Shortest and longest time between two questions to the admin server of a run."""
SHARE = 0.005
"""Largest share of the time that is spent with these questions, which the run has to answer."""


class OpenRun:
    """One run that is looked at; thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.columns = Columns(root)
        self._events = _Tail(root / EVENTS_FILE, EVENTS_KEPT)
        self._timeline = _Tail(root / TIMELINE_FILE, STEPS_KEPT)
        self._mesh = PacedLook(Viewer(root).look)

    def events(self) -> list[dict[str, Any]]:
        """Return the events, newest first."""
        return self._events.read()[::-1]

    def timeline(self, steps: int) -> list[dict[str, Any]]:
        """Return the lines of the last steps."""
        return self._timeline.read()[-steps:]

    def mesh(self) -> dict[str, Any] | None:
        """Return the object of `tree --json`, seconds old at most; None without a status."""
        return self._mesh.seen(next(iter(self.changes_of_mesh()), None))

    def changes_of_mesh(self) -> list[dict[str, Any]]:
        """Return the events that report deaths, restarts and new sizes, newest first."""
        return [one for one in self.events() if str(one.get("event", "")).endswith(MESH_CHANGES)]

    def warnings(self) -> list[dict[str, Any]]:
        """Return the newest event of each kind of warning, newest first."""
        found: dict[str, dict[str, Any]] = {}
        for one in self.events():
            if (kind := str(one.get("event", ""))) in WARNINGS:
                found.setdefault(kind, one)
        return list(found.values())


class PacedLook:
    """What was seen last, looked at again after a time that grows with that of a look.

    Sooner where something has happened. Thread-safe: who comes while another one looks waits for
    what that one sees.
    """

    def __init__(
        self, look: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock, self._lock = look, clock, threading.Lock()
        self._seen: dict[str, Any] | None = None
        self._happened: object = None
        self._soonest, self._next = float("-inf"), float("-inf")

    def seen(self, happened: object = None) -> dict[str, Any] | None:
        """Return it; None where nothing can be seen.

        Where `happened` is not what it was at the last look, the shortest time is waited for only.
        """
        with self._lock:
            began = self._clock()
            if began >= (self._next if happened == self._happened else self._soonest):
                try:
                    self._seen = self._look()
                except RunUnavailable:
                    self._seen = None
                now, self._happened = self._clock(), happened
                self._soonest = now + LOOK_S
                self._next = now + min(LONGEST_LOOK_S, max(LOOK_S, (now - began) / SHARE))
            return self._seen


@lru_cache(maxsize=RUNS_KEPT)
def _kept(root: Path) -> OpenRun:
    return OpenRun(root)


def open_run(root: Path) -> OpenRun:
    """Return a run that may have been looked at before, its columns read up to the file's end."""
    found = _kept(root)
    with suppress(UnusableFile):  # the table of runs says what is wrong with the file
        found.columns.read_on()
    return found


class _Tail:
    """The last objects of a file of JSON lines."""

    def __init__(self, path: Path, most: int) -> None:
        self._lines, self._kept = FollowedLines(path), deque[dict[str, Any]](maxlen=most)
        self._lock = threading.Lock()

    def read(self) -> list[dict[str, Any]]:
        with self._lock:
            with suppress(UnusableFile):  # what was read before is shown; `verify` says why
                for line in self._lines.new():
                    if (found := event_of(line)) is not None:
                        self._kept.append(found)
            return list(self._kept)
