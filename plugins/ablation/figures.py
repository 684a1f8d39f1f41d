"""Statistics of an ablation: means over seeds, their intervals, steps to a target, power.

Only finished runs count. The interval of the success at a step is Student's t over seeds, because
the seed, which determines policy, episodes and samples, is the unit of repetition. It is never
narrower than Wilson's interval of all episodes together, which seeds that agree by chance would
otherwise undercut. With one seed it is Wilson's alone and does not cover the variation between
seeds.

What a comparison of so many seeds can see is the power of the paired t-test. Differences by seed
are taken as normal, with a standard deviation that is stated or that earlier runs had: plain
numbers, in the unit of the differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from composer_mesh.services.directory.report import Z_95, Evaluation, wilson_interval

INTERVAL = (
    "95 % interval of the mean: Student's t over seeds, never narrower than Wilson's of all "
    "episodes together; one seed: Wilson's alone, which says nothing of other seeds"
)

# Student's 97.5 % quantile by degrees of freedom, 1 to 10; above, the series below is accurate.
_T_975 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582),
    *(2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
)


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """Held-out success of an arm after `step` optimizer steps."""

    step: int
    success: Estimate


def t_quantile(degrees: int) -> float:
    """Return Student's 97.5 % quantile, to four digits."""
    if degrees < 1:
        raise ValueError(f"degrees is {degrees} but must be 1 or more: give two values or more")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = Z_95
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def mean_over_seeds(values: Sequence[float]) -> Estimate | None:
    """Return the mean with Student's interval; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def success_over_seeds(evaluations: Sequence[Evaluation]) -> Estimate:
    """Return the mean success of one step's evaluations, one of each seed."""
    mean = statistics.fmean(evaluation.success for evaluation in evaluations)
    low, high = wilson_interval(mean, sum(evaluation.episodes for evaluation in evaluations))
    if between := mean_over_seeds([evaluation.success for evaluation in evaluations]):
        low, high = min(low, between.low), max(high, between.high)
    return Estimate(mean, max(0.0, low), min(1.0, high))


def curve(runs: Mapping[int, Sequence[Evaluation]]) -> list[Point]:
    """Return an arm's success by step, over the steps at which every seed was evaluated."""
    by_step = [{evaluation.step: evaluation for evaluation in run} for run in runs.values()]
    shared = sorted(set(by_step[0]).intersection(*by_step[1:])) if by_step else []
    return [Point(step, success_over_seeds([run[step] for run in by_step])) for step in shared]


def steps_to(evaluations: Sequence[Evaluation], target: float) -> int | None:
    """Return the step of the first evaluation that reached the target, or None."""
    return next((e.step for e in evaluations if e.success >= target), None)


def median_steps(steps: Sequence[int | None]) -> float | None:
    """Return the median, with None as infinity; None if the median is infinite."""
    if not steps:
        return None
    median = statistics.median(math.inf if step is None else step for step in steps)
    return None if math.isinf(median) else median


def mean_over_run(evaluations: Sequence[Evaluation]) -> float:
    """Return the mean success from the first to the last step, by the trapezoidal rule."""
    if len(evaluations) < 2:
        return evaluations[0].success
    area = sum((b.step - a.step) * (a.success + b.success) / 2 for a, b in pairwise(evaluations))
    return area / (evaluations[-1].step - evaluations[0].step)


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Return the differences by seed, over common seeds, which share policy and episodes."""
    return [values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())]


NORMAL = statistics.NormalDist()
POWER = 0.8
"""Chance to see a true difference, at a two-sided level of 5 %."""
PIECES = 2000
"""Pieces of the integral over the estimated deviation; even, for Simpson's rule."""


@dataclass(frozen=True)
class Deviation:
    """The standard deviation of differences by seed, as a share of success, and where it is from.

    `source` is None where it was stated.
    """

    value: float
    source: str | None = None
    arm: str | None = None
    seeds: int = 0


def power_of(difference: float, deviation: float, seeds: int) -> float:
    """Return the chance that a true difference is seen: that the interval of the mean lacks 0.

    The two-sided paired t-test at 5 %, whose statistic has the noncentral t distribution.
    """
    if seeds < 2 or deviation < 0:
        raise ValueError(
            f"seeds is {seeds} and deviation is {deviation}, but a paired test needs 2 seeds or "
            "more and a deviation of 0 or more: correct them"
        )
    if deviation == 0:
        return 1.0 if difference else 0.05
    shift, degrees = abs(difference) / deviation * math.sqrt(seeds), seeds - 1
    critical = t_quantile(degrees)

    def outside(ratio: float) -> float:
        """Of the estimated over the true deviation: the chance beyond either end."""
        return NORMAL.cdf(shift - critical * ratio) + NORMAL.cdf(-shift - critical * ratio)

    # The ratio's square is chi-squared over its degrees of freedom.
    log_scale = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    most = 1 + 10 / math.sqrt(2 * degrees)
    width, total = most / PIECES, 0.0
    for place in range(PIECES + 1):
        ratio = place * width
        weight = 1 if place in (0, PIECES) else 4 if place % 2 else 2
        if ratio > 0:
            log_density = log_scale + (degrees - 1) * math.log(ratio) - degrees / 2 * ratio**2
            density = math.exp(log_density)
        else:
            density = math.exp(log_scale) if degrees == 1 else 0.0
        total += weight * density * outside(ratio)
    return total * width / 3


def detectable(deviation: float, seeds: int) -> float | None:
    """Return the least difference that so many seeds see with a chance of `POWER`.

    None for fewer than two seeds, which have no interval.
    """
    if seeds < 2:
        return None
    low, high = 0.0, 1.0
    while power_of(high, 1.0, seeds) < POWER:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle, 1.0, seeds) >= POWER else (middle, high)
    return high * deviation


def deviations_of(reports: Sequence[Mapping[str, Any]], source: str) -> list[Deviation]:
    """Return the deviations of an earlier ablation's differences to the baseline, largest first.

    They are of the mean success over a run, for arms that have two seeds or more.
    """
    found = []
    for report in reports:
        means = {arm: _per_seed(one) for arm, one in report["arms"].items()}
        baseline = means.pop("neither", {})
        for arm, values in means.items():
            differences = paired(values, baseline)
            if len(differences) > 1:
                value = statistics.stdev(differences)
                found.append(Deviation(value, source, arm, len(differences)))
    return sorted(found, key=lambda one: -one.value)


def power_line(seeds: int, deviation: Deviation | None) -> str:
    """Say what so many seeds can see."""
    count = f"{seeds} seed{'s' * (seeds != 1)}"
    least = detectable(1.0 if deviation is None else deviation.value, seeds)
    if least is None:
        return f"{count} can see no difference: an interval over seeds needs 2 or more"
    if deviation is None:
        return (
            f"{count} can see a difference of {least:.2f} times the standard deviation of "
            f"differences by seed (chance {POWER:.0%}, two-sided 5 %); state it with --deviation, "
            "or name an earlier ablation with --deviation-from"
        )
    points, least_points = 100 * deviation.value, 100 * least
    whence = "as stated"
    if deviation.source is not None:
        whence = f"from {deviation.seeds} seeds of {deviation.arm} in {deviation.source}"
    return (
        f"{count} can see a difference of {least_points:.1f} points in mean success over the run "
        f"(chance {POWER:.0%}, two-sided 5 %); the standard deviation of differences by seed is "
        f"{points:.1f} points, {whence}"
    )


def _per_seed(arm: Mapping[str, Any]) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in arm["mean_over_run"]["per_seed"].items()}
