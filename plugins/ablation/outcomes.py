"""States, evaluations and costs of the planned runs, read from their own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.untrusted_json import MIB, short_reason
from composer_mesh.plugins.ablation.plan import PlannedRun, is_finished
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
        None if summary is None else _cost(place / METRICS_FILE, summary),
    )


def _summary(path: Path) -> _Summary | None:
    try:
        return _SUMMARY.validate_json(read_regular(path, MIB))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} is no summary of a run ({short_reason(error)}): take it from a copy, or move "
            "it away"
        ) from None


def _cost(path: Path, summary: _Summary) -> Cost:
    steps = read_metrics(path)
    usd = summary.replay.usd + summary.hints.usd + summary.judges.usd
    return Cost(_total(path, steps, "tokens/trained"), _total(path, steps, "time/step_s"), usd)


def _total(path: Path, steps: Sequence[Mapping[str, Any]], key: str) -> float:
    try:
        return sum(_AMOUNT.validate_python(step.get(key) or 0) for step in steps)
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} holds a {key} that is no amount ({short_reason(error)}): take it from a copy, "
            "or let train --resume make it again from run.sqlite"
        ) from None
