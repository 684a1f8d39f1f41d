"""Detached local processes: identified, followed and ended.

A process is named by its id and start time, because ids are reused.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_mesh.mesh.processes import is_alive, kill_group, start_ticks
from composer_mesh.services.inspection.events_command import Lines

POLL_S = 0.2


class Paced:
    """Caches a boolean answer for some time."""

    def __init__(self, ask: Callable[[], bool], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._answer, self._next = True, time.monotonic()

    def __call__(self) -> bool:
        if time.monotonic() >= self._next:
            self._answer = self._ask()
            self._next = time.monotonic() + self._every_s
        return self._answer


def name_of(pid: int) -> str:
    """Return a process's unique name."""
    return f"{pid}@{start_ticks(pid) or '?'}"


def pid_of(name: str) -> int:
    """Return the process id in a name."""
    return int(name.partition("@")[0])


def lives(name: str) -> bool:
    """Whether that process is alive, and not another with the same id."""
    pid = pid_of(name)
    return is_alive(pid) and name == name_of(pid)


def lines_of(log: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of a log as they are written, until `goes_on` returns False."""
    return Lines(log).until_the_end(goes_on, lambda: time.sleep(POLL_S))


def end(name: str, grace_s: float) -> None:
    """Send SIGTERM; if it is still alive after the grace period, kill its process group."""
    if not lives(name):
        return
    os.kill(pid_of(name), signal.SIGTERM)
    until = time.monotonic() + grace_s
    while lives(name):
        if time.monotonic() >= until:
            kill_group(pid_of(name))
            return
        time.sleep(POLL_S)
