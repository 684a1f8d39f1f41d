"""What a comparison of so many seeds can see: the power of the paired t-test, before it starts.

Differences by seed are taken as normal with a standard deviation that is stated or that earlier
runs had. Plain numbers, in the unit of the differences.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.plugins.ablation.figures import paired, t_quantile

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
        return _normal(shift - critical * ratio) + _normal(-shift - critical * ratio)

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
        f"(chance {POWER:.0%}, two-sided 5 %), at a standard deviation of differences by seed of "
        f"{points:.1f} points, {whence}"
    )


def _per_seed(arm: Mapping[str, Any]) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in arm["mean_over_run"]["per_seed"].items()}


def _normal(value: float) -> float:
    """Return the normal distribution function."""
    return 0.5 * math.erfc(-value / math.sqrt(2))
