"""The report page of an ablation: `ablation.md`, with its tables and the pictures beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.ablation.curve import PICTURE_FILE
from composer_mesh.plugins.ablation.difficulty import DIFFICULTY_FILE, panels_of
from composer_mesh.plugins.ablation.report import settings_of
from composer_mesh.plugins.ablation.tables import Rows, notes, step_rows, summary_rows, title_of

PAGE_FILE = "ablation.md"


def write_page(report: Mapping[str, Any], output: Path) -> None:
    """Replace `ablation.md` atomically."""
    text = "\n".join(page_lines(report)) + "\n"
    write_whole(output / PAGE_FILE, text.encode())


def page_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page, in Markdown."""
    yield "# Ablation: a run with and without its channels"
    yield ""
    if report.get("power"):
        yield f"{report['power']}."
        yield ""
    if report.get("difficulty") is not None:
        yield from _by_difficulty(report)
    for setting in settings_of(report):
        yield from _setting(setting, report.get("usd_per_hour"))


def _by_difficulty(report: Mapping[str, Any]) -> Iterator[str]:
    key = report["difficulty"]
    yield f"## Held-out success by {key}, after the last step"
    yield ""
    yield f"![success by {key}]({DIFFICULTY_FILE})"
    yield ""
    for title, settings in panels_of(report).items():
        arms = list(settings[0]["arms"])
        rows = [
            [one["values"][key], *(_last(one["arms"][arm]) for arm in arms)] for one in settings
        ]
        if title:
            yield f"{title}:"
            yield ""
        yield from _table([key, *(title_of(arm) for arm in arms)], rows)


def _last(arm: Mapping[str, Any]) -> str:
    if not arm["curve"]:
        return "-"
    point = arm["curve"][-1]
    low, high = (100 * end for end in point["interval_95"])
    return f"{100 * point['mean']:.1f} % ({low:.0f} to {high:.0f})"


def _setting(report: Mapping[str, Any], usd_per_hour: float | None) -> Iterator[str]:
    name = report["setting"]
    if name:
        yield f"## {name}"
        yield ""
    changes = " ".join(f"--set {one}" for one in report["overrides"])
    yield f"`{report['config']}`{f', `{changes}`' if changes else ''}"
    yield ""
    yield f"![held-out success by step]({Path(name, PICTURE_FILE).as_posix()})"
    yield ""
    yield from _table(
        ["step", *(title_of(arm) for arm in report["arms"])],
        [*step_rows(report), *summary_rows(report)],
    )
    for line in notes(report, usd_per_hour):
        yield f"- {line}"
    yield ""


def _table(head: list[str], rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
    yield ""
