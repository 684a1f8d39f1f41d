"""Result of an ablation: `ablation.json` with all data, and the report of each of its settings.

States, evaluations and costs of the planned runs are read from their own files, so the result does
not depend on when or how often runs were made. Statistics of the arms are plain objects, null for
unknown values. Differences to the baseline are paired by seed, which shares policy and episodes
between arms.

`study_lines` says before an ablation starts which runs it has, and what its seeds can see.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.untrusted_json import MIB, parsed_json, short_reason
from composer_mesh.plugins.ablation.figures import (
    INTERVAL,
    Deviation,
    Estimate,
    curve,
    deviations_of,
    mean_over_run,
    mean_over_seeds,
    median_steps,
    paired,
    power_line,
    steps_to,
)
from composer_mesh.plugins.ablation.plan import BASELINE, Ablation, PlannedRun, Study, is_finished
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    Evaluation,
    read_evaluations,
    read_metrics,
)

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FINISHED = "finished"


@dataclass(frozen=True)
class Cost:
    """What a run took: tokens of the policy loss, seconds of its steps, dollars of its queries.

    The seconds are those of the steps alone, of all parts of a run that was resumed: neither its
    start nor its evaluations. Dollars are those of teachers, hint writers and judges.
    """

    tokens: Amount
    seconds: Amount
    usd: Amount


@dataclass(frozen=True)
class RunOutcome:
    """State of a planned run: finished, failed, stopped (can be resumed), or missing."""

    run: PlannedRun
    state: str
    reason: str
    wall_s: float | None
    evaluations: list[Evaluation]
    cost: Cost | None = None
    """None for a run without a summary."""

    @property
    def finished(self) -> bool:
        return self.state == FINISHED


@dataclass(frozen=True)
class _Priced:
    """A part of a summary that has cost money."""

    usd: Amount = 0.0


@dataclass(frozen=True)
class _Summary:
    """What is read of a `summary.json`."""

    wall_s: Amount
    replay: _Priced = field(default_factory=_Priced)
    hints: _Priced = field(default_factory=_Priced)
    judges: _Priced = field(default_factory=_Priced)


_SUMMARY = fail_fast(_Summary)
_AMOUNT = fail_fast(Amount)


def outcomes(
    runs: Sequence[PlannedRun], output: Path, merged: Mapping[Path, RunOutcome] | None = None
) -> list[RunOutcome]:
    """Return the state of every planned run, read from its directory.

    A run that has not finished there may be one of `merged`.
    """
    found = [_outcome(run, output / run.place) for run in runs]
    others = merged or {}
    return [one if one.finished else others.get(one.run.place, one) for one in found]


def _outcome(run: PlannedRun, place: Path) -> RunOutcome:
    events = read_metrics(place / "events.jsonl")
    state, reason = "missing", ""
    if is_finished(place, run.config.run.steps):
        state = FINISHED
    elif events:
        failed = [event.get("detail") for event in events if event.get("event") == "run_failed"]
        state, reason = ("failed", str(failed[-1])) if failed else ("stopped", "")
    summary = _summary(place / SUMMARY_FILE)
    return RunOutcome(
        run,
        state,
        reason,
        None if summary is None else summary.wall_s,
        read_evaluations(place / EVALUATIONS_FILE),
        None if summary is None else _cost_of(place / METRICS_FILE, summary),
    )


def _summary(path: Path) -> _Summary | None:
    try:
        return _SUMMARY.validate_json(read_regular(path, MIB))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} is not a summary of a run ({short_reason(error)}): take it from a copy, or "
            "move it away"
        ) from None


def _cost_of(path: Path, summary: _Summary) -> Cost:
    steps = read_metrics(path)
    usd = summary.replay.usd + summary.hints.usd + summary.judges.usd
    return Cost(_total(path, steps, "tokens/trained"), _total(path, steps, "time/step_s"), usd)


def _total(path: Path, steps: Sequence[Mapping[str, Any]], key: str) -> float:
    try:
        return sum(_AMOUNT.validate_python(step.get(key) or 0) for step in steps)
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} holds a {key} that is not an amount ({short_reason(error)}): take it from a "
            "copy, or let train --resume make it again from run.sqlite"
        ) from None


Values = Mapping[int, float]
"""Numbers by seed."""


def arms_of(
    plan: Ablation, found: Sequence[RunOutcome], usd_per_hour: float | None = None
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


def _cost(done: Sequence[RunOutcome], usd_per_hour: float | None) -> dict[str, Any]:
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


REPORT_FILE = "ablation.json"
LARGEST_REPORT = 64 * MIB


def study_report(
    study: Study,
    output: Path,
    power: str = "",
    usd_per_hour: float | None = None,
    merged: Mapping[Path, RunOutcome] | None = None,
) -> dict[str, Any]:
    """Return the content of `ablation.json`; that of a single setting is its own report."""
    found = [ablation_report(one, output, usd_per_hour, merged) for one in study.settings]
    rest = {"power": power, "usd_per_hour": usd_per_hour}
    if study.single:
        return found[0] | rest
    return {"name": "ablate", "difficulty": study.difficulty, **rest, "settings": found}


def settings_of(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the reports of an ablation's settings."""
    settings: Sequence[Mapping[str, Any]] = report.get("settings", [report])
    return settings


def ablation_report(
    plan: Ablation,
    output: Path,
    usd_per_hour: float | None = None,
    merged: Mapping[Path, RunOutcome] | None = None,
) -> dict[str, Any]:
    """Return the report of a setting: plain objects, null for unknown values."""
    found = outcomes(plan.runs, output, merged)
    return {
        "name": "ablate",
        "setting": plan.setting,
        "values": dict(plan.values),
        "config": str(plan.file),
        "overrides": list(plan.overrides),
        "steps": plan.base.run.steps,
        "eval_every": plan.eval_every,
        "episodes": plan.base.eval.episodes,
        "target": plan.target,
        "interval": INTERVAL,
        "seeds": list(plan.seeds),
        "arms": arms_of(plan, found, usd_per_hour),
        "runs": [_run(outcome) for outcome in found],
        "base": plan.base.model_dump(mode="json"),
    }


def write_report(report: Mapping[str, Any], output: Path) -> None:
    """Replace `ablation.json` atomically."""
    content = json.dumps(report, indent=1, allow_nan=False).encode() + b"\n"
    write_whole(output / REPORT_FILE, content)


def earlier_deviation(path: Path) -> Deviation | None:
    """Return the largest deviation of differences by seed in an earlier ablation.

    `path` is its directory or its `ablation.json`. None if no arm has two seeds there. Raises
    `RunDirectoryError` if there is no such report.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        report = parsed_json(read_regular(file, LARGEST_REPORT))
        found = deviations_of(settings_of(report), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{file} is not a report of an ablation ({short_reason(error)}): name the directory of "
            "one, or state the deviation with --deviation"
        ) from None
    return found[0] if found else None


def unfinished(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the runs of all settings that did not finish."""
    for setting in settings_of(report):
        yield from (run for run in setting["runs"] if run["state"] != "finished")


def _run(outcome: RunOutcome) -> dict[str, Any]:
    config = outcome.run.config
    return {
        "arm": outcome.run.arm,
        "seed": outcome.run.seed,
        "sdpo.alpha": config.sdpo.alpha,
        "replay.beta": config.replay.beta,
        "directory": str(outcome.run.place),
        "state": outcome.state,
        "reason": outcome.reason,
        "wall_s": outcome.wall_s,
        "cost": None if outcome.cost is None else asdict(outcome.cost),
        "evaluations": [asdict(evaluation) for evaluation in outcome.evaluations],
    }


def power_before(arguments: argparse.Namespace, seeds: int, output: Path) -> str:
    """Say what so many seeds can see, from the stated deviation or that of earlier runs.

    Without either, those of an earlier report in the output directory count. Raises `UsageError`
    and `RunDirectoryError`.
    """
    stated: float | None = arguments.deviation
    if stated is not None:
        if not 0 < stated < math.inf:
            raise UsageError(
                f"--deviation is {stated} but must be points of success above 0: correct it"
            )
        return power_line(seeds, Deviation(stated / 100))
    source: Path | None = arguments.deviation_from
    if source is None and (output / REPORT_FILE).is_file():
        source = output
    deviation = None if source is None else earlier_deviation(source)
    if deviation is None and arguments.deviation_from is not None:
        raise UsageError(
            f"--deviation-from {source} has no arm with two finished seeds and the baseline, "
            "so it has no deviation: name another, or state it with --deviation"
        )
    return power_line(seeds, deviation)


def study_lines(
    study: Study, output: Path, power: str, merged: Container[Path] = ()
) -> Iterator[str]:
    """Yield the planned runs, how many of them have finished, and what they can see."""
    done = [
        run.place in merged or is_finished(output / run.place, run.config.run.steps)
        for run in study.runs
    ]
    yield f"{len(done)} runs, {sum(done)} of them finished, in {output}"
    for setting in study.settings:
        arms, seeds = ", ".join(setting.arms), ", ".join(map(str, setting.seeds))
        name = setting.setting or str(setting.file)
        yield f"  {name}: {arms}; seeds {seeds}; {setting.base.run.steps} steps"
    yield power
