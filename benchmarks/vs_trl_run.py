"""Observes one side of `vs_trl` from outside: a process, its metrics and its checkpoints.

Both sides write the same files, so both are measured by the same code and the same clock.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_S = 0.05
LEFT_OUT = ("state",)
SMOOTHED = 3
"""Steps over which the success of sampled rollouts is averaged."""


class SideFailed(RuntimeError):
    """A training process has ended with an error."""


@dataclass(frozen=True)
class Step:
    """A step: the action tokens that it trained, and when it ended (time.monotonic).

    `success` is the share of its own rollouts that were solved.
    """

    step: int
    tokens: int
    ended: float
    success: float


@dataclass
class Recorded:
    """Measurements of one run. `began` is when its first step started."""

    launched: float
    began: float = 0.0
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)
    policies: dict[int, Path] = field(default_factory=dict)
    """Copies of its saved policies, by step."""

    def tokens_per_s(self, skip: int, last: int) -> float:
        """Return tokens per second from the end of step `skip` to the end of step `last`."""
        tokens = sum(one.tokens for one in self.steps if skip < one.step <= last)
        return tokens / (self._end_of(last) - (self._end_of(skip) if skip else self.began))

    def trained_s(self, step: int) -> float:
        """Return the seconds from the start of the first step to the end of this one."""
        return self._end_of(step) - self.began

    def sampled(self, goal: float) -> int | None:
        """Return the first step whose rollouts and those of the two before reached the goal."""
        for last in range(SMOOTHED, len(self.steps) + 1):
            if statistics.mean(one.success for one in self.steps[last - SMOOTHED : last]) >= goal:
                return self.steps[last - 1].step
        return None

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the process to its end."""
        return self.ended - self.launched

    def _end_of(self, step: int) -> float:
        return next(one.ended for one in self.steps if one.step == step)


def record(
    command: Sequence[str],
    output: Path,
    env: dict[str, str],
    keep: Path,
    patience_s: float | None = None,
) -> Recorded:
    """Run a side to its end, or until it is out of time, and keep its policies.

    Raises `SideFailed` with the end of its log.
    """
    log = keep.with_suffix(".log")
    with log.open("w") as file:
        found = Recorded(time.monotonic())
        process = subprocess.Popen(
            list(command), env=os.environ | env, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                if patience_s is not None and time.monotonic() > found.launched + patience_s:
                    return found
                _look(found, output, keep)
                time.sleep(POLL_S)
        finally:
            process.terminate()
            process.wait()
    found.ended = time.monotonic()
    _look(found, output, keep)
    if process.returncode:
        words = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SideFailed(f"{command[1]} ended with status {process.returncode}:\n{words}")
    return found


def _look(found: Recorded, output: Path, keep: Path) -> None:
    """Record what is new."""
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    now = time.monotonic()
    for line in map(json.loads, lines[len(found.steps) :]):
        if not found.steps:
            found.began = now - line["time/step_s"]
        tokens, success = line["tokens/trained"], line["reward/success"]
        found.steps.append(Step(line["step"], tokens, now, success))
    for folder in (output / "checkpoints").glob("step-*"):
        step, copy = int(folder.name.removeprefix("step-")), keep / folder.name
        if step not in found.policies:
            with contextlib.suppress(OSError):  # it was old, and is removed while it is copied
                shutil.copytree(folder, copy, ignore=lambda *_: LEFT_OUT, dirs_exist_ok=True)
                found.policies[step] = copy
