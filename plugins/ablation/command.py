"""The `composer-mesh ablate` command: trains the planned runs and reports after each of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.plugins.ablation.curve import PICTURE_FILE, draw_ablation
from composer_mesh.plugins.ablation.difficulty import DIFFICULTY_FILE, draw_difficulty
from composer_mesh.plugins.ablation.outcomes import Outcome
from composer_mesh.plugins.ablation.page import PAGE_FILE, write_page
from composer_mesh.plugins.ablation.plan import Train, run_ablation
from composer_mesh.plugins.ablation.report import (
    REPORT_FILE,
    settings_of,
    study_report,
    unfinished,
    write_report,
)
from composer_mesh.plugins.ablation.settings import Study
from composer_mesh.plugins.ablation.tables import notes, report_table

INCOMPLETE = 1


def ablate_command(
    study: Study,
    output: Path,
    train: Train,
    power: str = "",
    usd_per_hour: float | None = None,
    merged: Mapping[Path, Outcome] | None = None,
) -> int:
    """Return the exit status: 0, 1 if a run did not finish, 130 after Ctrl-C, 143 after SIGTERM."""
    console = Console()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def publish() -> dict[str, Any]:
        """Write the report of all ended runs."""
        report = study_report(study, output, power, usd_per_hour, merged)
        write_report(report, output)
        return report

    if power:
        tell(power)
    code = run_ablation(study.runs, output, train, tell, publish, merged or ())
    report = publish()
    _draw(report, output)
    write_page(report, output)
    for setting in settings_of(report):
        console.print(report_table(setting))
        for line in notes(setting, usd_per_hour):
            tell(line)
    tell(f"everything: {output / REPORT_FILE}")
    tell(f"page: {output / PAGE_FILE}")
    if study.single:
        tell(f"curves: {output / PICTURE_FILE}")
    complete = not any(unfinished(report))
    return code or (0 if complete else INCOMPLETE)


def _draw(report: dict[str, Any], output: Path) -> None:
    """Draw the curves of each setting, and what they come to by difficulty."""
    for setting in settings_of(report):
        folder = output / setting["setting"]
        folder.mkdir(parents=True, exist_ok=True)
        draw_ablation(setting, folder / PICTURE_FILE)
    if report.get("difficulty") is not None:
        draw_difficulty(report, output / DIFFICULTY_FILE)
