"""Statistics of the arms of one setting, as plain objects of the report: null for unknown values.

Differences to the baseline are paired by seed, which shares policy and episodes between arms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.plugins.ablation.figures import (
    Estimate,
    curve,
    mean_over_run,
    mean_over_seeds,
    median_steps,
    paired,
    steps_to,
)
from composer_mesh.plugins.ablation.outcomes import Outcome
from composer_mesh.plugins.ablation.plan import BASELINE, Ablation
from composer_mesh.services.directory.report import Evaluation

Values = Mapping[int, float]
"""Numbers by seed."""


def arms_of(
    plan: Ablation, found: Sequence[Outcome], usd_per_hour: float | None = None
) -> dict[str, Any]:
    """Return the statistics of each arm, over its finished runs."""
    done = {
        arm: {one.run.seed: one for one in found if one.run.arm == arm and one.finished}
        for arm in plan.arms
    }
    runs = {arm: {s: one.evaluations for s, one in own.items()} for arm, own in done.items()}
    means = {arm: {s: mean_over_run(run) for s, run in own.items()} for arm, own in runs.items()}
    final = {arm: {s: run[-1].success for s, run in own.items()} for arm, own in runs.items()}
    steps = {arm: _bounded_steps(plan, own) for arm, own in runs.items()}

    def minus(values: Mapping[str, Values], arm: str, ends: tuple[float, float]) -> Any:
        if arm == BASELINE:
            return None
        return _estimate(paired(values[arm], values.get(BASELINE, {})), ends)

    most = float(plan.base.run.steps)
    return {
        arm: {
            "curve": [_point(point.step, point.success) for point in curve(runs[arm])],
            "steps_to_target": _steps_to_target(plan, runs[arm]),
            "mean_over_run": _means(means[arm]),
            "minus_neither": minus(means, arm, (-1, 1)),
            "final": _means(final[arm]),
            "final_minus_neither": minus(final, arm, (-1, 1)),
            "steps_minus_neither": minus(steps, arm, (-most, most)),
            "cost": _cost(list(done[arm].values()), usd_per_hour),
        }
        for arm in plan.arms
    }


def _bounded_steps(plan: Ablation, runs: Mapping[int, Sequence[Evaluation]]) -> dict[int, float]:
    """Return the steps to the target by seed; a run that never reaches it counts all its steps."""
    found = {seed: steps_to(run, plan.target) for seed, run in runs.items()}
    return {s: float(plan.base.run.steps if n is None else n) for s, n in found.items()}


def _cost(done: Sequence[Outcome], usd_per_hour: float | None) -> dict[str, Any]:
    """Return what the runs took in the mean, and for each point of success that they gained.

    Points are those of the last evaluation over the first; both are sums over seeds, so that a seed
    that gained little does not decide. Null a point where nothing was gained. With a price of the
    machine its hours are part of the dollars.
    """
    with_cost = [(one, one.cost) for one in done if one.cost is not None]
    if not with_cost:
        return {"mean": None, "per_point": None}
    points = sum(
        100 * (one.evaluations[-1].success - one.evaluations[0].success) for one, _ in with_cost
    )
    hours = usd_per_hour or 0.0
    totals = {
        "tokens": sum(cost.tokens for _, cost in with_cost),
        "seconds": sum(cost.seconds for _, cost in with_cost),
        "usd": sum(cost.usd + cost.seconds / 3600 * hours for _, cost in with_cost),
    }
    return {
        "mean": {name: total / len(with_cost) for name, total in totals.items()},
        "per_point": {n: total / points for n, total in totals.items()} if points > 0 else None,
    }


def _point(step: int, success: Estimate) -> dict[str, Any]:
    return {"step": step, "mean": success.mean, "interval_95": [success.low, success.high]}


def _steps_to_target(plan: Ablation, runs: Mapping[int, Sequence[Evaluation]]) -> dict[str, Any]:
    steps = {seed: steps_to(run, plan.target) for seed, run in runs.items()}
    return {"per_seed": _by_seed(steps), "median": median_steps(list(steps.values()))}


def _means(values: Values) -> dict[str, Any]:
    return {"per_seed": _by_seed(values), **_estimate(list(values.values()), (0, 1))}


def _estimate(values: Sequence[float], ends: tuple[float, float]) -> dict[str, Any]:
    """Return the mean of some values and its interval, which is clipped to what is possible."""
    interval = mean_over_seeds(values)
    low, high = ends
    return {
        "mean": sum(values) / len(values) if values else None,
        "interval_95": [max(low, interval.low), min(high, interval.high)] if interval else None,
    }


def _by_seed(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(seed): value for seed, value in values.items()}
