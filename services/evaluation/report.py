"""Shows an evaluation: a table by task, and one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.services.evaluation.figures import Share, TaskFigures
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.whole_files import write_whole


def evaluation_table(figures: Sequence[TaskFigures]) -> Table:
    """Return the figures as a printable table, a column for each task."""
    table = Table("", box=SIMPLE_HEAD)
    table.columns[0].style = "cyan"
    for one in figures:
        table.add_column(Text(plain_text(one.task, 40)))
    for label in dict.fromkeys(label for one in figures for label in _rows(one)):
        table.add_row(
            Text(plain_text(label, 40)), *(Text(_rows(one).get(label, "")) for one in figures)
        )
    return table


def evaluation_json(
    about: Mapping[str, Any], figures: Sequence[TaskFigures], failed: int
) -> dict[str, Any]:
    """Return the evaluation as a JSON object: what was evaluated, and the figures by task."""
    tasks = {one.task: one.as_json() for one in figures}
    return {**about, "failed_samples": failed, "tasks": tasks}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object in place of a file; raises OSError."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def _rows(one: TaskFigures) -> dict[str, str]:
    repeated = {f"pass@{k}": _share(share) for k, share in one.pass_at.items() if k > 1}
    return {
        "episodes": f"{one.episodes:,}",
        "samples": f"{one.samples:,}",
        "success": _share(one.success),
        **repeated,
        "reward": f"{one.reward:.3f}",
        **{f"  {name}": f"{value:.3f}" for name, value in one.rewards.items()},
        "turns": f"{one.turns:.1f}",
        "errors": f"{one.errors:.1f}",
    }


def _share(share: Share) -> str:
    low, high = share.interval
    return f"{share.mean:.1%}  ({low:.1%} to {high:.1%})"
