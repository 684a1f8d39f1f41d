"""The `composer-mesh ablate` command: trains the planned runs and reports after each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.services.ablation.curve import PICTURE_FILE, draw_ablation
from composer_mesh.services.ablation.plan import Ablation, Train, run_ablation
from composer_mesh.services.ablation.report import (
    REPORT_FILE,
    ablation_report,
    notes,
    report_table,
    write_report,
)

INCOMPLETE = 1


def ablate_command(plan: Ablation, output: Path, train: Train) -> int:
    """Return the exit status: 0, 1 if a run did not finish, 130 after Ctrl-C, 143 after SIGTERM."""
    console = Console()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    code = run_ablation(plan, output, train, tell, lambda: _publish(plan, output))
    report = _publish(plan, output)
    draw_ablation(report, output / PICTURE_FILE)
    console.print(report_table(report))
    for line in notes(report):
        tell(line)
    tell(f"everything: {output / REPORT_FILE}")
    tell(f"curves: {output / PICTURE_FILE}")
    complete = all(run["state"] == "finished" for run in report["runs"])
    return code or (0 if complete else INCOMPLETE)


def _publish(plan: Ablation, output: Path) -> dict[str, Any]:
    """Write the report of all ended runs."""
    report = ablation_report(plan, output)
    write_report(report, output)
    return report
