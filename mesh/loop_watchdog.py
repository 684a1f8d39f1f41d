"""A watchdog of an event loop: reports each time that the loop does not answer for too long.

A thread asks the loop, and counts the seconds without an answer. Time in which the loop's thread
was ready to run and the machine gave it no core, and time in which this process as a whole stood
still or another thread held the interpreter, is not the loop's, and is not counted. What the loop's
thread has computed always is. Off unless `COMPOSER_MESH_LOOP_REPORTS` names a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from weakref import WeakSet

REPORTS = "COMPOSER_MESH_LOOP_REPORTS"
"""The folder of the reports, a file for each process; without it nothing is watched."""
LIMIT_S = "COMPOSER_MESH_LOOP_LIMIT_S"
"""How long a loop may be silent, by the environment; 0.5 s without."""
PERIOD_S = 0.05
DEEPEST = 12
"""Frames of a reported stack, the innermost of all."""

Report = Callable[[float, str], None]
_watched: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds that a thread has computed, and that it has waited for a core while it could."""

    computed_s: float
    queued_s: float


class _ThreadEnded(Exception):
    """The loop's thread is gone, whether or not its loop was closed before."""


class SilentTime:
    """The seconds of one silence that are the loop's own, slice by slice. Knows no clock."""

    def __init__(self, period_s: float, at: ThreadTimes) -> None:
        self._period_s, self._last = period_s, at
        self.seconds = 0.0

    def add(self, elapsed_s: float, now: ThreadTimes) -> None:
        """A slice in which the loop did not answer.

        Who measures is in the same process: that a slice took longer than its period says that the
        process, or whoever measures, stood still too.
        """
        computed = now.computed_s - self._last.computed_s
        queued = now.queued_s - self._last.queued_s
        self._last = now
        self.seconds += max(computed, min(elapsed_s, self._period_s) - queued, 0.0)

    def end(self, computed_s: float) -> None:
        """The answer has come; by then the thread had computed so many seconds in all."""
        self.seconds += max(computed_s - self._last.computed_s, 0.0)


class LoopWatchdog:
    """Watches the loop of the thread that makes it, from `start` until `stop` or the loop's end."""

    def __init__(self, limit_s: float, report: Report, period_s: float = PERIOD_S) -> None:
        if not 0 < period_s < limit_s:
            raise ValueError(
                f"limit_s is {limit_s:g} but must be above period_s = {period_s:g}: raise limit_s"
            )
        self._limit_s, self._report, self._period_s = limit_s, report, period_s
        self._loop = asyncio.get_running_loop()
        self._ident, self._task = threading.get_ident(), threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._stopped, self._answered = threading.Event(), threading.Event()
        self._at_answer = 0.0
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Waits for the watching thread's end."""
        self._stopped.set()
        self.ended()

    def ended(self) -> None:
        """Wait until nothing is watched any more."""
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(_ThreadEnded):
            while not self._stopped.is_set() and self._ask():
                self._count()
                self._stopped.wait(self._period_s)

    def _ask(self) -> bool:
        """Ask the loop for an answer; whether there still is a loop."""
        self._answered.clear()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it is closed
            return False
        return True

    def _answer(self) -> None:
        self._at_answer = time.thread_time()
        self._answered.set()

    def _count(self) -> None:
        """Count until the loop answers; report once a silence is over the limit, with its stack."""
        silent, stack, before = SilentTime(self._period_s, self._times()), "", time.monotonic()
        while not self._answered.wait(self._period_s) and not self._stopped.is_set():
            if self._loop.is_closed():
                return
            now = time.monotonic()
            silent.add(now - before, self._times())
            before = now
            if silent.seconds > self._limit_s / 2:
                stack = self._stack() or stack
        if self._answered.is_set():
            silent.end(self._at_answer)
        if silent.seconds > self._limit_s:
            self._report(silent.seconds, stack or "not seen: the interpreter was held all the time")

    def _times(self) -> ThreadTimes:
        try:
            computed_s = time.clock_gettime(self._clock)
        except OSError:
            raise _ThreadEnded from None
        return ThreadTimes(computed_s, _queued_s(self._task))

    def _stack(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._ident)
        if frame is None:
            return ""
        return "".join(traceback.format_list(traceback.extract_stack(frame)[-DEEPEST:]))


def _queued_s(task: int) -> float:
    """Seconds that a thread of this process has waited for a core; 0 where Linux does not tell."""
    try:
        found = Path(f"/proc/self/task/{task}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(found.split()[1]) / 1e9


def watch_this_loop(name: str) -> None:
    """Watch the running loop, once, where the environment asks for it; `name` is in its reports."""
    folder, loop = os.environ.get(REPORTS), asyncio.get_running_loop()
    if not folder or loop in _watched:
        return
    _watched.add(loop)
    file = Path(folder) / f"{name}-{os.getpid()}.jsonl"

    def report(seconds: float, stack: str) -> None:
        told = {"event": "event_loop_blocked", "process": name, "seconds": round(seconds, 3)}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**told, "stack": stack}) + "\n")

    LoopWatchdog(float(os.environ.get(LIMIT_S, "0.5")), report).start()
