"""A watchdog of an event loop: reports each time that the loop does not answer for too long.

A thread asks the loop, and counts the seconds without an answer. What the loop's thread computes is
counted, and what it waits for in a callback, but not the machine's part in it: time in which a
thread of this process was ready to run and had no core, in which the process as a whole stood still
or another thread held the interpreter, or in which the loop waited for its next event. Off unless
`COMPOSER_MESH_LOOP_REPORTS` names a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
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
_SELECT = selectors.DefaultSelector.select.__code__
_watched: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


class _ThreadEnded(Exception):
    """The loop's thread is gone, whether or not its loop was closed before."""


class SilentTime:
    """The seconds of one silence that are the loop's own, slice by slice. Knows no clock."""

    def __init__(self, period_s: float, computed_s: float) -> None:
        self._period_s, self._computed_s = period_s, computed_s
        self.seconds = 0.0

    def add(self, elapsed_s: float, computed_s: float, machine_s: float) -> None:
        """A slice without an answer, of which so many seconds were the machine's part.

        `computed_s` is what the loop's thread has computed in all. Who measures is in the same
        process: that a slice took longer than its period says that this process stood still too.
        """
        computed, self._computed_s = computed_s - self._computed_s, computed_s
        self.seconds += max(computed, min(elapsed_s, self._period_s) - machine_s, 0.0)

    def end(self, computed_s: float) -> None:
        """The answer has come; by then the thread had computed so many seconds in all."""
        self.seconds += max(computed_s - self._computed_s, 0.0)


class LoopWatchdog:
    """Watches the loop of the thread that makes it, from `start` until `stop` or the loop's end."""

    def __init__(self, limit_s: float, report: Report, period_s: float = PERIOD_S) -> None:
        if not 0 < period_s < limit_s:
            raise ValueError(
                f"limit_s is {limit_s:g} but must be above period_s = {period_s:g}: raise limit_s"
            )
        self._limit_s, self._report, self._period_s = limit_s, report, period_s
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
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
        silent, stack = SilentTime(self._period_s, self._computed_s()), ""
        before, queued = time.monotonic(), queued_by_thread()
        while not self._answered.wait(self._period_s) and not self._stopped.is_set():
            if self._loop.is_closed():
                return
            now, queues = time.monotonic(), queued_by_thread()
            machine_s = now - before if self._is_idle() else longest_wait(queued, queues)
            silent.add(now - before, self._computed_s(), machine_s)
            before, queued = now, queues
            if silent.seconds > self._limit_s / 2:
                stack = self._stack() or stack
        if self._answered.is_set():
            silent.end(self._at_answer)
        if silent.seconds > self._limit_s:
            self._report(silent.seconds, stack or "not seen: the interpreter was held all the time")

    def _computed_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            raise _ThreadEnded from None

    def _is_idle(self) -> bool:
        """Whether the loop waits for events, or for the interpreter after one has come."""
        frame = self._frame()
        return frame is not None and frame.f_code is _SELECT

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._ident)

    def _stack(self) -> str:
        frame = self._frame()
        if frame is None:
            return ""
        return "".join(traceback.format_list(traceback.extract_stack(frame)[-DEEPEST:]))


def queued_by_thread() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a core; empty but on Linux."""
    found = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            found[task.parent.name] = int(task.read_text().split()[1]) / 1e9
    return found


def longest_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The longest that one thread has waited for a core between two looks.

    The loop's thread may wait for another one, which waits for the core.
    """
    return max((waited - before.get(task, 0.0) for task, waited in after.items()), default=0.0)


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
