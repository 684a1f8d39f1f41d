"""What is said of an ablation before it starts: its runs, and what its seeds can see."""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Iterator
from pathlib import Path

from composer_mesh.plugins.ablation.plan import is_finished
from composer_mesh.plugins.ablation.power import Deviation, power_line
from composer_mesh.plugins.ablation.report import REPORT_FILE, earlier_deviation
from composer_mesh.plugins.ablation.settings import Study
from composer_mesh.services.checks.accepting import UsageError


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
            f"--deviation-from {source} has no arm with two finished seeds beside the baseline, so "
            "it has no deviation: name another, or state it with --deviation"
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
