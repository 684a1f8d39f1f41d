"""Result of an ablation: `ablation.json` with all data, a table, and qualifying notes.

It is computed from the runs' own files, so it does not depend on when or how often runs were made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.untrusted_json import MIB, short_reason
from composer_mesh.services.ablation.figures import (
    INTERVAL,
    Estimate,
    curve,
    mean_over_run,
    mean_over_seeds,
    median_steps,
    paired,
    steps_to,
)
from composer_mesh.services.ablation.plan import BASELINE, Ablation, PlannedRun, is_finished
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    SUMMARY_FILE,
    Evaluation,
    read_evaluations,
    read_metrics,
)
from composer_mesh.services.inspection.page import plain_text

REPORT_FILE = "ablation.json"
TARGET = 0.8
TITLES = {"neither": "neither", "sdpo": "+sdpo", "replay": "+replay", "both": "both"}
NEVER = "never"

Arm = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """State of a planned run: finished, failed, stopped (can be resumed), or missing."""

    run: PlannedRun
    state: str
    reason: str
    wall_s: float | None
    evaluations: list[Evaluation]


@dataclass(frozen=True)
class _Summary:
    """What is read of a `summary.json`."""

    wall_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


_SUMMARY = TypeAdapter(_Summary)


def outcomes(plan: Ablation, output: Path) -> list[Outcome]:
    """Return the state of every planned run, read from its directory."""
    return [_outcome(run, output / run.place) for run in plan.runs]


def _outcome(run: PlannedRun, place: Path) -> Outcome:
    events = read_metrics(place / "events.jsonl")
    state, reason = "missing", ""
    if is_finished(place, run.config.run.steps):
        state = "finished"
    elif events:
        failed = [event.get("detail") for event in events if event.get("event") == "run_failed"]
        state, reason = ("failed", str(failed[-1])) if failed else ("stopped", "")
    return Outcome(run, state, reason, _wall_s(place), read_evaluations(place / EVALUATIONS_FILE))


def _wall_s(place: Path) -> float | None:
    path = place / SUMMARY_FILE
    try:
        return _SUMMARY.validate_json(read_regular(path, MIB)).wall_s
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} is no summary of a run ({short_reason(error)}): take it from a copy, or move "
            "it away"
        ) from None


def ablation_report(plan: Ablation, output: Path) -> dict[str, Any]:
    """Return the content of `ablation.json`: plain objects, null for unknown values."""
    found = outcomes(plan, output)
    return {
        "name": "ablate",
        "config": str(plan.file),
        "overrides": list(plan.overrides),
        "steps": plan.base.run.steps,
        "eval_every": plan.eval_every,
        "episodes": plan.base.eval.episodes,
        "target": TARGET,
        "interval": INTERVAL,
        "seeds": list(plan.seeds),
        "arms": _arms(plan, found),
        "runs": [_run(outcome) for outcome in found],
        "base": plan.base.model_dump(mode="json"),
    }


def write_report(report: Mapping[str, Any], output: Path) -> None:
    """Replace `ablation.json` atomically."""
    draft = output / f".{REPORT_FILE}.{os.getpid()}"
    draft.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(output / REPORT_FILE)


def _run(outcome: Outcome) -> dict[str, Any]:
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
        "evaluations": [asdict(evaluation) for evaluation in outcome.evaluations],
    }


def _arms(plan: Ablation, found: Sequence[Outcome]) -> dict[str, Any]:
    runs = {
        arm: {o.run.seed: o.evaluations for o in found if o.run.arm == arm and _counts(o)}
        for arm in plan.arms
    }
    means = {arm: {s: mean_over_run(run) for s, run in runs[arm].items()} for arm in plan.arms}
    return {
        arm: {
            "curve": [_point(point.step, point.success) for point in curve(runs[arm])],
            "steps_to_target": _steps_to_target(runs[arm]),
            "mean_over_run": _means(means[arm]),
            "minus_neither": _minus(means[arm], means.get(BASELINE, {}))
            if arm != BASELINE
            else None,
        }
        for arm in plan.arms
    }


def _counts(outcome: Outcome) -> bool:
    return outcome.state == "finished"


def _point(step: int, success: Estimate) -> dict[str, Any]:
    return {"step": step, "mean": success.mean, "interval_95": [success.low, success.high]}


def _steps_to_target(runs: Mapping[int, Sequence[Evaluation]]) -> dict[str, Any]:
    steps = {seed: steps_to(run, TARGET) for seed, run in runs.items()}
    return {"per_seed": _by_seed(steps), "median": median_steps(list(steps.values()))}


def _means(values: Mapping[int, float]) -> dict[str, Any]:
    return {"per_seed": _by_seed(values), **_estimate(list(values.values()), lowest=0)}


def _minus(values: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any]:
    """Return the difference of the means over the run, paired by seed."""
    return _estimate(paired(values, baseline), lowest=-1)


def _estimate(values: Sequence[float], lowest: int) -> dict[str, Any]:
    """Return the mean of shares or of differences; its interval is clipped to [`lowest`, 1]."""
    interval = mean_over_seeds(values)
    return {
        "mean": sum(values) / len(values) if values else None,
        "interval_95": [max(lowest, interval.low), min(1, interval.high)] if interval else None,
    }


def _by_seed(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(seed): value for seed, value in values.items()}


def report_table(report: Mapping[str, Any]) -> Table:
    """Render held-out success by step and arm, with summary rows below."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text("held-out success by step"))
    table.add_column("step", justify="right", style="cyan")
    arms = report["arms"]
    for arm in arms:
        table.add_column(TITLES[arm], justify="right")
    curves = {arm: {point["step"]: point for point in arms[arm]["curve"]} for arm in arms}
    for step in sorted({step for points in curves.values() for step in points}):
        table.add_row(str(step), *(_share(curves[arm].get(step)) for arm in arms))
    table.add_section()
    table.add_row(f"steps to {report['target']:.0%}", *(_steps(arms[arm]) for arm in arms))
    table.add_row("of each seed", *(_steps_of_seeds(arms[arm]) for arm in arms))
    table.add_row("mean over run", *(_share(arms[arm]["mean_over_run"]) for arm in arms))
    table.add_row("minus neither", *(_points(arms[arm]["minus_neither"]) for arm in arms))
    return table


def notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the table: the method, and runs that are not included."""
    yield (
        f"seeds {', '.join(map(str, report['seeds']))}; "
        f"{report['episodes']:,} held-out episodes every {report['eval_every']} steps"
    )
    yield report["interval"]
    yield (
        f"steps to {report['target']:.0%}: the first evaluation that reached it, median of seeds; "
        "minus neither: in percentage points of the mean over the run, paired by seed"
    )
    for run in report["runs"]:
        if run["state"] != "finished":
            reason = f": {plain_text(run['reason'])}" if run["reason"] else ""
            yield f"not in the table: {run['arm']}, seed {run['seed']} {run['state']}{reason}"


def _share(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return "-"
    return f"{100 * estimate['mean']:.1f}%" + _interval(estimate["interval_95"], "")


def _points(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return "-"
    return f"{100 * estimate['mean']:+.1f}" + _interval(estimate["interval_95"], "+")


def _interval(ends: Sequence[float] | None, sign: str) -> str:
    if ends is None:
        return ""
    low, high = (100 * end for end in ends)
    return f" {low:{sign}.0f}..{high:{sign}.0f}"


def _steps(arm: Arm) -> str:
    steps = arm["steps_to_target"]
    return _step(steps["median"]) if steps["per_seed"] else "-"


def _steps_of_seeds(arm: Arm) -> str:
    return ", ".join(map(_step, arm["steps_to_target"]["per_seed"].values())) or "-"


def _step(step: float | None) -> str:
    return NEVER if step is None else f"{step:g}"
