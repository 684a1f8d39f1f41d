"""Statistics of an ablation: means over seeds, their intervals, steps to a target.

Only finished runs count. The interval of the success at a step is Student's t over seeds, because
the seed, which determines policy, episodes and samples, is the unit of repetition. It is never
narrower than Wilson's interval of all episodes together, which seeds that agree by chance would
otherwise undercut. With one seed it is Wilson's alone and does not cover the variation between
seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
