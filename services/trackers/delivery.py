"""Brings figures to one tracker on a thread of its own, so that it cannot hold up or end a run.

    run -- offer, never waits --> queue of bounded length --> thread --> tracker

What does not fit into the queue is left out and counted. The first failure is reported; a tracker
that fails to start, or MOST_FAILURES times in a row, gets nothing more. At the end the tracker has
`finish_s` seconds to take the rest; the thread of one that blocks for ever is left behind, and ends
with the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from composer_mesh.services.trackers.port import TrackedRun, TrackedStep, Tracker

MOST_FAILURES = 10
Tell = Callable[[str, str], None]
"""Called with the kind of an event and its text, from the thread or from the run."""


@dataclass(frozen=True)
class _End:
    state: str


class Delivery:
    """The queue and the thread of one tracker; `make` imports and builds it on the thread."""

    def __init__(
        self, make: Callable[[], Tracker], run: TrackedRun, most_waiting: int, tell: Tell
    ) -> None:
        self._make, self._run, self._tell = make, run, tell
        self._waiting: queue.Queue[TrackedStep | _End] = queue.Queue(most_waiting)
        self._left_out, self._failed_before = 0, False
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def offer(self, step: TrackedStep) -> None:
        """Hand over the figures of a step, without waiting."""
        if self._given_up.is_set():
            return
        try:
            self._waiting.put_nowait(step)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._tell(
                    "tracker_slow",
                    f"{self._waiting.maxsize} steps wait for it, so step {step.step} and others "
                    "are left out until it has caught up",
                )

    def close(self, state: str, within_s: float) -> None:
        """Let the tracker take the rest, for at most so many seconds. Waits for that."""
        until = time.monotonic() + within_s
        if not self._given_up.is_set():
            with suppress(queue.Full):
                self._waiting.put(_End(state), timeout=within_s)
                self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._given_up.is_set():
            self._tell(
                "tracker_left_behind",
                f"it had {within_s:g} s to finish and has not: {self._waiting.qsize()} of the last "
                "steps may be missing there",
            )
        elif self._left_out:
            self._tell("tracker_incomplete", f"{self._left_out} steps were left out")

    def _work(self) -> None:
        try:
            tracker = self._make()
            if where := tracker.start(self._run):
                self._tell("tracker_started", where)
            self._log_all(tracker)
        except Exception as error:  # noqa: BLE001  supervision boundary: the run continues
            self._give_up("failed and gets nothing more", error)

    def _log_all(self, tracker: Tracker) -> None:
        failures = 0
        while isinstance(one := self._waiting.get(), TrackedStep):
            try:
                tracker.log(one)
                failures = 0
            except Exception as error:
                failures += 1
                self._note_failure(error, failures)
                if failures == MOST_FAILURES:
                    raise
        tracker.finish(one.state)

    def _note_failure(self, error: Exception, failures: int) -> None:
        """Tell the first failure, not those that follow it."""
        if failures == 1 and not self._failed_before:
            self._failed_before = True
            self._tell("tracker_failed", f"{_line(error)}; later steps are tried")

    def _give_up(self, what: str, error: Exception) -> None:
        self._given_up.set()
        self._tell("tracker_given_up", f"it {what}: {_line(error)}")


def _line(error: Exception) -> str:
    text = (str(error) or "no message").partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}"
