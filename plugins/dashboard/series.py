"""The figures of a run as columns, read on as its `metrics.jsonl` grows; and curves made of them.

A column holds one number for each step, NaN where the step has none. Curves are columns over an
axis, smoothed and reduced to as many points as a chart can show.
"""

from __future__ import annotations

import math
import statistics
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from composer_mesh.plugins.dashboard.catalog import tokens_per_s, usd_of
from composer_mesh.services.directory.report import METRICS_FILE
from composer_mesh.services.inspection.events_command import FollowedLines, event_of

Axis = Literal["step", "tokens", "time", "usd"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time", "usd")
AXIS_TITLES = {
    "step": "optimizer step",
    "tokens": "tokens trained",
    "time": "hours of steps",
    "usd": "dollars",
}
MOST_POINTS = 300
MOST_COLUMNS = 600
OUTCOMES = "replay/outcome/"
"""Metrics of the states that teachers decided; one query may decide several equal states."""
RECENT = 20
"""Number of the last steps whose median is shown with the last value."""
NAN = math.nan


class Columns:
    """The figures of one run; thread-safe."""

    def __init__(self, root: Path) -> None:
        self._lines = FollowedLines(root / METRICS_FILE)
        self._lock = threading.Lock()
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self.last: dict[str, Any] = {}

    def read_on(self) -> int:
        """Read the steps that are new; return the number of steps."""
        with self._lock:
            for line in self._lines.new():
                step = event_of(line)
                if step is not None and isinstance(step.get("step"), int):
                    self._add(step)
            return len(self.steps)

    def column(self, key: str) -> Sequence[float]:
        """Return the numbers of a metric, one for each step; empty if no step has it."""
        with self._lock:
            return array("d", self._columns.get(key, ()))

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the last `RECENT` steps that have it."""
        return recent_median(self.column(key))

    def names(self) -> list[str]:
        """Return the names of all metrics."""
        with self._lock:
            return sorted(self._columns)

    def axis(self, axis: Axis) -> list[float]:
        """Return the place of each step on an axis; totals since the start of the run."""
        if axis == "step":
            return [float(step) for step in self.steps]
        if axis == "usd":
            return list(self.column("usd/total"))
        key, unit = ("tokens/trained", 1.0) if axis == "tokens" else ("time/step_s", 3600.0)
        return [total / unit for total in accumulate(map(_zero, self.column(key)))]

    def _add(self, step: dict[str, Any]) -> None:
        number = step["step"]
        if self.steps and number <= self.steps[-1]:  # the file was written anew by a resume
            self._cut(bisect_left(self.steps, number))
        at = len(self.steps)
        self.steps.append(number)
        figures = {key: value for key, value in step.items() if _is_number(value)}
        figures |= derived(step)
        for key, value in figures.items():
            if key not in self._columns and len(self._columns) < MOST_COLUMNS:
                self._columns[key] = array("d", [NAN] * at)
            if key in self._columns:
                self._columns[key].append(float(value))
        for column in self._columns.values():
            if len(column) == at:
                column.append(NAN)
        self.last = step

    def _cut(self, length: int) -> None:
        del self.steps[length:]
        for column in self._columns.values():
            del column[length:]


@dataclass(frozen=True)
class Curve:
    """A line of a chart; `colour` is the number of a colour, `bands` the ends of intervals.

    `median` is that of the last `RECENT` steps, before smoothing.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    bands: Sequence[tuple[float, float]] = ()
    dots: bool = False
    median: float | None = None


def recent_median(values: Sequence[float]) -> float | None:
    """Return the median of the last `RECENT` finite values; None of fewer than two."""
    recent = [one for one in values if math.isfinite(one)][-RECENT:]
    return statistics.median(recent) if len(recent) > 1 else None


def curve(
    label: str,
    xs: Sequence[float],
    ys: Sequence[float],
    colour: int = 0,
    smoothing: float = 0.0,
    most: int = MOST_POINTS,
) -> Curve:
    """Return the curve of a column, without the steps that have no number.

    `smoothing` is the weight of the past in an exponential mean, from 0 to below 1.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=False) if math.isfinite(x) and math.isfinite(y)]
    kept = reduced(points, most, smoothing)
    shape = [x for x, _ in kept], [y for _, y in kept]
    return Curve(label, *shape, colour, median=recent_median([y for _, y in points]))


def reduced(
    points: Sequence[tuple[float, float]], most: int, smoothing: float = 0.0
) -> list[tuple[float, float]]:
    """Smooth points by an exponential mean without bias, then keep at most `most` of them.

    Each point that is kept is the mean of those that it stands for.
    """
    if smoothing:
        points = _smoothed(points, smoothing)
    if len(points) <= most:
        return list(points)
    edges = [len(points) * place // most for place in range(most + 1)]
    parts = [points[a:b] for a, b in pairwise(edges)]
    return [(part[-1][0], math.fsum(y for _, y in part) / len(part)) for part in parts]


def _smoothed(points: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
    mean = share = 0.0
    found = []
    for x, y in points:
        mean, share = weight * mean + (1 - weight) * y, weight * share + (1 - weight)
        found.append((x, mean / share))
    return found


def derived(step: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a step that follow from others: rates and shares, NaN without any."""
    rollouts = step.get("rollouts/count") or 0
    decided = sum(n for key, n in step.items() if key.startswith(OUTCOMES) and _is_number(n))
    return {
        "usd/total": usd_of(step),
        "tokens/per_s": tokens_per_s(step) or NAN,
        "replay/pair_share": (step.get("replay/outcome/pair") or 0) / decided if decided else NAN,
        "rollouts/error_sites_each": (step.get("rollouts/error_sites") or 0) / rollouts
        if rollouts
        else NAN,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
