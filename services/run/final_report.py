"""What a run leaves when it ends: its summary, printed and written, and its reward curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.services.directory.report import (
    METRICS_FILE,
    Evaluation,
    read_metrics,
    summary_table,
    write_summary,
)

CURVE_FILE = "reward.png"


def final_report(
    output: Path,
    name: str,
    *,
    wall_s: float,
    evaluations: Sequence[Evaluation],
    restarts: int,
    rest: Mapping[str, Any],
) -> None:
    """Write and print the summary of a run, and draw its curve; raises OSError."""
    summary = write_summary(
        output, wall_s=wall_s, evaluations=evaluations, restarts=restarts, rest=rest
    )
    # Imported late, since plotting is not needed before the end.
    from composer_mesh.services.directory.curve import draw_reward_curve

    curve = output / CURVE_FILE
    metrics = read_metrics(output / METRICS_FILE)
    draw_reward_curve(metrics, curve, evaluations=evaluations, title=name)
    console = Console()
    console.print(summary_table(name, summary))
    console.print(f"reward curve: {curve}", markup=False, highlight=False, soft_wrap=True)
