"""What a tracker is: the port that ours implement, and that one of yours implements.

A tracker runs on a thread of its own (`delivery`): its methods may block, and what they raise does
not reach the run. They are called one after another, first `start`, last `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker starts to follow.

    `folder` is the tracker's own in the run's directory, and is the same one when the run is
    resumed. `config` is the resolved config as plain values; it contains no credentials.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class TrackedStep:
    """The figures after `step` optimizer steps, at `at` seconds since 1970.

    `values` are finite numbers under the names of docs/trackers.md. `metrics` is the object of
    `metrics.jsonl`, empty for an evaluation.
    """

    step: int
    at: float
    values: Mapping[str, float]
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the figures of one run."""

    def start(self, run: TrackedRun) -> str:
        """Begin, or continue a resumed run; return where people find it, or an empty text."""
        ...

    def log(self, step: TrackedStep) -> None:
        """Take the figures of a step or of an evaluation; steps never decrease."""
        ...

    def finish(self, state: str) -> None:
        """Write what remains. `state` is finished, stopped or failed."""
        ...


class TrackerRefused(Exception):
    """A tracker cannot work as configured; the message says why, and what to do instead."""
