"""Brings figures to one tracker on a thread of its own, so that it cannot hold up or end a run.

    run -- offer, never waits --> queue of bounded length --> thread --> tracker

What does not fit into the queue is left out and counted. The first failure is reported; a tracker
that fails to start, or MOST_FAILURES times in a row, gets nothing more. At the end the tracker has
`finish_s` seconds to take the rest; the thread of one that blocks for ever is left behind, and ends
with the process.

Names of figures in trackers are those of TRL where it has one, our own for the rest: whoever
compares with a run of TRL finds the same quantity under the same name. docs/trackers.md has the
table, which a test compares with this one.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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


NAMES = {
    "loss/total": "train/loss",
    "loss/policy": "train/policy_loss",
    "loss/sdpo": "train/sdpo_loss",
    "loss/replay": "train/replay_loss",
    "policy/lr": "train/learning_rate",
    "policy/grad_norm": "train/grad_norm",
    "policy/entropy": "train/entropy",
    "policy/clipped_fraction": "train/clip_ratio/region_mean",
    "reward/mean": "train/reward",
    "reward/success": "train/success_rate",
    "logprob_mismatch/mean": "train/sampling/sampling_logp_difference/mean",
    "logprob_mismatch/max": "train/sampling/sampling_logp_difference/max",
    "replay/accuracy": "train/rewards/accuracies",
    "replay/margin": "train/rewards/margins",
    "replay/chosen_reward": "train/rewards/chosen",
    "replay/rejected_reward": "train/rewards/rejected",
    "time/step_s": "train/step_time",
}
"""Names in trackers by those of `metrics.jsonl`."""
REWARD_FUNCTION = "reward/of/"


class Names:
    """Converts metrics of steps in order; counts what trackers show as totals."""

    def __init__(self, trained_tokens: float = 0.0) -> None:
        self._tokens = trained_tokens

    def of_step(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the finite numbers of a step under their names in trackers."""
        values = {
            name_of(key): float(value)
            for key, value in metrics.items()
            if key != "step" and is_figure(value)
        }
        self._tokens += values.get("tokens/trained", 0.0)
        values["train/num_tokens"] = self._tokens
        if seconds := metrics.get("time/step_s"):
            values["perf/tokens_per_s"] = float(metrics.get("tokens/trained") or 0) / seconds
        return values


def trained_tokens(steps: Iterable[Mapping[str, Any]]) -> float:
    """Return the tokens that these steps have trained."""
    return math.fsum(step.get("tokens/trained") or 0 for step in steps)


def name_of(key: str) -> str:
    """Return the name of a metric in trackers."""
    if key.startswith(REWARD_FUNCTION):
        return f"train/rewards/{key.removeprefix(REWARD_FUNCTION)}/mean"
    return NAMES.get(key, key)


def of_evaluation(
    success: float,
    interval: tuple[float, float],
    episodes: int,
    tasks: Mapping[str, tuple[float, int]],
) -> dict[str, float]:
    """Return the figures of a held-out evaluation; the interval is the 95 % one of its success."""
    return {
        "eval/success_rate": success,
        "eval/success_low": interval[0],
        "eval/success_high": interval[1],
        "eval/episodes": float(episodes),
        **{f"eval/success_rate/{task}": share for task, (share, _) in tasks.items()},
    }


def is_figure(value: Any) -> bool:
    """Whether a metric is a finite number; channels that are off have none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
