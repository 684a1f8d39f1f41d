"""Compare configs and arms of `composer-mesh ablate`: paired differences over policies and seeds.

`ablate` compares the arms of one setting. This pools all settings that differ in varied values
alone, such as `--vary policy.path=A,B,C`, and compares arms of different configs with each other.

    python benchmarks/ablation_compare.py FOLDER... --base CONFIG/ARM
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.plugins.ablation.figures import mean_over_run, mean_over_seeds
from composer_mesh.plugins.ablation.report import REPORT_FILE, settings_of
from composer_mesh.services.directory.report import METRICS_FILE, Evaluation, read_metrics

Unit = tuple[str, int]
"""The varied values and the seed that arms of a comparison have in common."""


@dataclass(frozen=True)
class Run:
    """Success of a finished run, and what it took; `answers` are those of teachers."""

    mean: float
    last: float
    gained: float
    seconds: float
    answers: float


def runs_of(folder: Path) -> dict[str, dict[Unit, Run]]:
    """Return the finished runs of an ablation's folder by `config/arm`, then by unit."""
    found: dict[str, dict[Unit, Run]] = defaultdict(dict)
    for setting in settings_of(json.loads((folder / REPORT_FILE).read_text())):
        for run in setting["runs"]:
            if run["state"] == "finished":
                unit = (json.dumps(setting["values"]), int(run["seed"]))
                name = f"{Path(setting['config']).stem}/{run['arm']}"
                found[name][unit] = _run(folder, run)
    return found


def _run(folder: Path, run: Mapping[str, Any]) -> Run:
    evaluations = [Evaluation(**one) for one in run["evaluations"]]
    first, last = evaluations[0].success, evaluations[-1].success
    steps = read_metrics(folder / run["directory"] / METRICS_FILE)
    answers = math.fsum(step.get("replay/answers") or 0 for step in steps)
    return Run(mean_over_run(evaluations), last, last - first, run["cost"]["seconds"], answers)


def row(name: str, runs: Mapping[Unit, Run], base: Mapping[Unit, Run]) -> str:
    """Return a line of the table; differences are in points, paired by unit."""
    shared = [unit for unit in runs if unit in base]
    cells = [name, str(len(runs))]
    for field in ("mean", "last"):
        values = {unit: getattr(run, field) for unit, run in runs.items()}
        pairs = [values[unit] - getattr(base[unit], field) for unit in shared]
        cells += [f"{100 * sum(values.values()) / len(values):.1f} %", _difference(pairs)]
    points = 100 * math.fsum(run.gained for run in runs.values())
    cells += [_by(math.fsum(run.seconds for run in runs.values()), points)]
    cells += [_by(math.fsum(run.answers for run in runs.values()), points)]
    return f"| {' | '.join(cells)} |"


def _difference(pairs: list[float]) -> str:
    estimate = mean_over_seeds(pairs)
    if estimate is None:
        return f"{100 * pairs[0]:+.1f}" if pairs else ""
    mean, low, high = (100 * one for one in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _by(total: float, points: float) -> str:
    return f"{total / points:.2f}" if points > 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="outputs of composer-mesh ablate")
    parser.add_argument("--base", required=True, help="CONFIG/ARM that the others are compared to")
    arguments = parser.parse_args()
    found: dict[str, dict[Unit, Run]] = defaultdict(dict)
    for folder in arguments.folders:
        for name, runs in runs_of(folder).items():
            found[name] |= runs
    if arguments.base not in found:
        parser.error(f"--base is {arguments.base!r} but must be one of {', '.join(found)}")
    print(
        "| arm | runs | mean over the run | minus base | last | minus base | s a point | answers |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        print(row(name, runs, found[arguments.base]))


if __name__ == "__main__":
    main()
