"""Event-loop watchdog: reports each time that the loop is blocked for too long.

A thread pings the loop and counts the seconds without an answer. Computation on the loop's thread
and blocking waits in callbacks count. Time caused by the machine does not: while a thread of this
process was runnable without a core, the process was paused, another thread held the GIL (as the
import of an extension module does), or the loop waited for events or for the operating system to
start a thread. Off unless `COMPOSER_MESH_LOOP_REPORTS` names a folder.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from weakref import WeakSet

REPORTS = "COMPOSER_MESH_LOOP_REPORTS"
"""Environment variable: folder of the reports, one file per process; unset disables watching."""
LIMIT_S = "COMPOSER_MESH_LOOP_LIMIT_S"
"""Environment variable: longest time that a loop may block; 0.5 s by default."""
PERIOD_S = 0.05
DEEPEST = 12
"""Number of innermost frames in a reported stack."""
OTHERS_DEEPEST = 2
"""The same for each of the other threads."""

Report = Callable[[float, str], None]
_IMPORT = "importlib._bootstrap"
_SELECT = selectors.DefaultSelector.select.__code__
_START = threading.Thread.start.__code__
_watched: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


class _ThreadEnded(Exception):
    """The loop's thread has ended, whether or not its loop was closed."""


class SilentTime:
    """Seconds for which the loop itself was blocked, summed over time slices; has no clock."""

    def __init__(self, period_s: float, computed_s: float) -> None:
        self._period_s, self._computed_s = period_s, computed_s
        self._all_computed_s = 0.0
        self._slices: list[tuple[float, float]] = []  # how long it was, what of it counts as a wait

    @property
    def seconds(self) -> float:
        return self._all_computed_s + sum(waited for _, waited in self._slices)

    def add(self, elapsed_s: float, computed_s: float, machine_s: float) -> None:
        """Add a slice without an answer, of which `machine_s` seconds were caused by the machine.

        `computed_s` is the loop thread's total CPU time. The measuring thread is in the same
        process, so a slice that is longer than its period shows that the process itself was paused.
        """
        computed = self._compute(computed_s)
        waited = max(min(elapsed_s, self._period_s) - machine_s - computed, 0.0)
        self._slices.append((elapsed_s, waited))

    def excuse(self, machine_s: float) -> None:
        """Count no wait in the last slices, which turn out to have been caused by the machine.

        `machine_s` says how far back; what the thread computed in them still counts.
        """
        for place in reversed(range(len(self._slices))):
            if machine_s <= 0:
                break
            elapsed, waited = self._slices[place]
            self._slices[place] = (elapsed, max(waited - machine_s, 0.0))
            machine_s -= elapsed

    def end(self, computed_s: float) -> None:
        """Add the CPU time until the answer; `computed_s` is the thread's total by then."""
        self._compute(computed_s)

    def _compute(self, computed_s: float) -> float:
        computed = max(computed_s - self._computed_s, 0.0)
        self._computed_s = max(computed_s, self._computed_s)
        self._all_computed_s += computed
        return computed


class LoopWatchdog:
    """Watches the loop of the thread that creates it, from `start` until `stop` or its end."""

    def __init__(self, limit_s: float, report: Report, period_s: float = PERIOD_S) -> None:
        if not 0 < period_s < limit_s:
            raise ValueError(
                f"limit_s is {limit_s:g} but must be above period_s = {period_s:g}: raise limit_s"
            )
        self._limit_s, self._report, self._period_s = limit_s, report, period_s
        self._loop = asyncio.get_running_loop()
        self._ident, self._task = threading.get_ident(), str(threading.get_native_id())
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._stopped, self._answered = threading.Event(), threading.Event()
        self._at_answer = 0.0
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Waits until the watching thread has ended."""
        self._stopped.set()
        self.ended()

    def ended(self) -> None:
        """Wait until the watching thread has ended."""
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(_ThreadEnded):
            while not self._stopped.is_set() and self._ask():
                self._count()
                self._stopped.wait(self._period_s)

    def _ask(self) -> bool:
        """Ping the loop; return False if it is closed."""
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
        """Count until the loop answers; report a block above the limit, with the loop's stack."""
        silent, stack = SilentTime(self._period_s, self._computed_s()), ""
        began, queued = time.monotonic(), queued_by_thread()
        before = began
        while not self._answered.wait(self._period_s) and not self._stopped.is_set():
            if self._loop.is_closed():
                return
            now, queues = time.monotonic(), queued_by_thread()
            frame = self._frame()
            idle = waits_for_the_machine(frame)
            excused = idle or self._another_thread_imports()
            machine_s = now - before if excused else wait_for_cores(queued, queues, self._task)
            silent.excuse(longest_wait(queued, queues) - (now - before))
            silent.add(now - before, self._computed_s(), machine_s)
            before, queued = now, queues
            late = silent.seconds > self._limit_s / 2
            if late and not stack and frame is not None and not idle:
                stack = _in_lines(frame, DEEPEST) + self._others()
        if self._answered.is_set():
            silent.excuse(longest_wait(queued, queued_by_thread()) - (time.monotonic() - before))
            silent.end(self._at_answer)
        if silent.seconds > self._limit_s:
            stack = stack or "not seen: the interpreter was held all the time\n"
            all_s = time.monotonic() - began
            self._report(silent.seconds, f"{stack}{all_s:.1f} s without an answer in all\n")

    def _computed_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            raise _ThreadEnded from None

    def _another_thread_imports(self) -> bool:
        """Whether a thread other than the loop's is importing, which may hold the GIL for long."""
        others = (frame for ident, frame in sys._current_frames().items() if ident != self._ident)
        return any(
            _IMPORT in frame.f_code.co_filename for top in others for frame in _stack_of(top)
        )

    def _others(self) -> str:
        """Return where the other threads are, one of which may hold the GIL."""
        own = (self._ident, threading.get_ident())
        frames = [frame for ident, frame in sys._current_frames().items() if ident not in own]
        return "".join(f"another thread:\n{_in_lines(frame, OTHERS_DEEPEST)}" for frame in frames)

    def _frame(self) -> FrameType | None:
        """Return what the loop's thread executes; waiting for events or the GIL it is `_SELECT`."""
        return sys._current_frames().get(self._ident)


def waits_for_the_machine(frame: FrameType | None) -> bool:
    """Whether a thread waits for events, for the GIL after one, or for a new thread to start."""
    if frame is None or frame.f_code is _SELECT:
        return frame is not None
    return any(caller.f_code is _START for caller in _stack_of(frame))


def _in_lines(frame: FrameType, deepest: int) -> str:
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-deepest:]))


def _stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def queued_by_thread() -> dict[str, float]:
    """Return the seconds that each thread has waited for a core; empty except on Linux.

    The kernel adds a wait when it ends, so a thread that waits now may have waited for longer.
    """
    found = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread may have ended
            found[task.parent.name] = int(task.read_text().split()[1]) / 1e9
    return found


def wait_for_cores(before: Mapping[str, float], after: Mapping[str, float], loop: str) -> float:
    """Return the seconds between two samples that the thread `loop` waited for a core.

    Either itself, or at other times for a thread that waited for one: the longest such wait.
    """
    waits = {task: waited - before.get(task, 0.0) for task, waited in after.items()}
    return waits.pop(loop, 0.0) + max(waits.values(), default=0.0)


def longest_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the longest wait for a core of any thread that ended between two samples, in seconds.

    It began before the first sample if it is longer than the time between them.
    """
    known = ((after[task] - waited) for task, waited in before.items() if task in after)
    return max(known, default=0.0)


def watch_this_loop(name: str) -> None:
    """Watch the running loop, once, if the environment enables it; `name` appears in reports."""
    folder, loop = os.environ.get(REPORTS), asyncio.get_running_loop()
    if not folder or loop in _watched:
        return
    _watched.add(loop)
    file = Path(folder) / f"{name}-{os.getpid()}.jsonl"

    def report(seconds: float, stack: str) -> None:
        event = {"event": "event_loop_blocked", "process": name, "seconds": round(seconds, 3)}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**event, "stack": stack}) + "\n")

    LoopWatchdog(float(os.environ.get(LIMIT_S, "0.5")), report).start()
