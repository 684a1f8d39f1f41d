"""Result of an ablation: `ablation.json` with all data, and the report of each of its settings.

It is computed from the runs' own files, so it does not depend on when or how often runs were made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.untrusted_json import MIB, parsed_json, short_reason
from composer_mesh.plugins.ablation.arms import arms_of
from composer_mesh.plugins.ablation.figures import INTERVAL
from composer_mesh.plugins.ablation.outcomes import Outcome, outcomes
from composer_mesh.plugins.ablation.plan import Ablation
from composer_mesh.plugins.ablation.power import Deviation, deviations_of
from composer_mesh.plugins.ablation.settings import Study
from composer_mesh.services.directory.claim import RunDirectoryError

REPORT_FILE = "ablation.json"
LARGEST_REPORT = 64 * MIB


def study_report(
    study: Study,
    output: Path,
    power: str = "",
    usd_per_hour: float | None = None,
    merged: Mapping[Path, Outcome] | None = None,
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
    merged: Mapping[Path, Outcome] | None = None,
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
            f"{file} is no report of an ablation ({short_reason(error)}): name the directory of "
            "one, or state the deviation with --deviation"
        ) from None
    return found[0] if found else None


def unfinished(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the runs of all settings that did not finish."""
    for setting in settings_of(report):
        yield from (run for run in setting["runs"] if run["state"] != "finished")


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
        "cost": None if outcome.cost is None else asdict(outcome.cost),
        "evaluations": [asdict(evaluation) for evaluation in outcome.evaluations],
    }
