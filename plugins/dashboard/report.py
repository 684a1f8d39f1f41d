"""`composer-mesh report`: runs as one HTML file to send to somebody, with curves and rollouts.

The file has no script, loads nothing, and its Content-Security-Policy allows no more than its own
style.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.dashboard.catalog import Catalog, RunSummary, differing
from composer_mesh.plugins.dashboard.charts import charts_of_run, charts_of_runs
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.pages import render
from composer_mesh.plugins.dashboard.rollout_views import rollout
from composer_mesh.plugins.dashboard.run_views import figures_of
from composer_mesh.plugins.dashboard.series import Axis
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import StoreMissing, Where

STYLE = Path(__file__).parent / "static" / "style.css"
MOST_RUNS = 8


class ReportRefused(Exception):
    """A report cannot be written as requested; the message says why, and what to do instead."""


@dataclass(frozen=True)
class ReportOptions:
    """Runs, and where the report is written. `rollouts` of RUN:TRACE are shown turn by turn;
    without any, `samples` of each run are chosen: as many solved and failed ones of the last steps.
    """

    runs: Sequence[Path]
    out: Path
    axis: Axis = "step"
    smoothing: float = 0.0
    rollouts: Sequence[str] = ()
    samples: int = 2
    title: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.runs) <= MOST_RUNS:
            raise ReportRefused(
                f"{len(self.runs)} runs are named but a report has 1 to {MOST_RUNS}: name fewer"
            )
        if not 0 <= self.smoothing < 1:
            raise ReportRefused(f"--smooth is {self.smoothing:g} but must be from 0 to below 1")
        if self.samples < 0:
            raise ReportRefused(f"--samples is {self.samples} but must be 0 or more")


def report_command(options: ReportOptions, say: Callable[[str], None]) -> int:
    """Write the report; return the exit status."""
    text = report_html(options)
    write_whole(options.out, text.encode())
    say(f"wrote {options.out}, {len(text.encode()) / 1e6:.1f} MB")
    return 0


def report_html(options: ReportOptions) -> str:
    """Return the report as HTML. Raises ReportRefused, or the errors of damaged runs."""
    found = [(_summary(root), OpenRun(root)) for root in options.runs]
    for _, run in found:
        run.columns.read_on()
    runs = [summary for summary, _ in found]
    style = STYLE.read_text(encoding="utf-8")
    if len(found) == 1:
        (summary, run) = found[0]
        charts = charts_of_run(run.columns, summary.evaluations, options.axis, options.smoothing)
    else:
        columns = [(summary, run.columns) for summary, run in found]
        charts = charts_of_runs(columns, options.axis, options.smoothing)
    context = {
        "title": options.title or ", ".join(run.name for run in runs),
        "style": Markup(style),
        "style_hash": base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": runs,
        "figures": [figures_of(*one) for one in found],
        "charts": charts,
        "differences": differing(runs),
        "rollouts": list(_rollouts(options)),
    }
    return render("report.html", context)


def _summary(root: Path) -> RunSummary:
    catalog = Catalog(root)
    catalog.read_all()
    found = [one for one in catalog.runs() if one.root == root]
    if not found:
        raise ReportRefused(f"{root} is not the directory of a run: name one that train has made")
    return found[0]


def _rollouts(options: ReportOptions) -> list[dict[str, Any]]:
    named = options.rollouts or [
        f"{root}:{trace}" for root in options.runs for trace in _chosen(root, options.samples)
    ]
    known = {str(root): root for root in options.runs}
    found = []
    for text in named:
        place, _, trace = text.rpartition(":")
        root = known.get(place) if place else options.runs[0]
        if root is None:
            raise ReportRefused(
                f"--rollout {text!r}: {place!r} is not a run of this report: add it to the runs"
            )
        try:
            one = rollout(root, trace, "none", full=False)
        except RunUnavailable as error:
            raise ReportRefused(f"--rollout {text!r}: {error}") from None
        found.append({"run": root.name, **one})
    return found


def _chosen(root: Path, samples: int) -> list[str]:
    """Return solved and failed rollouts of the last steps, in turn."""
    try:
        with RunReader(root) as reader:
            pools = [
                [
                    row.trace_id
                    for row in reader.rows(
                        Where(success=success, split="train"), "group_id", True, samples
                    )
                ]
                for success in (True, False)
            ]
    except StoreMissing:
        return []
    turns = [one for pair in zip(*pools, strict=False) for one in pair]
    rest = [one for pool in pools for one in pool if one not in turns]
    return [*turns, *rest][:samples]
