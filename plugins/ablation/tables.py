"""An ablation as tables: rows of text for a terminal and for the report page, and their notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.services.inspection.page import plain_text

TITLES = {"neither": "neither", "both": "both"}
NEVER = "never"

Arm = Mapping[str, Any]
Rows = list[list[str]]


def title_of(arm: str) -> str:
    """Return the heading of an arm: that of a single channel is its name with a plus."""
    return TITLES.get(arm, f"+{arm}")


def report_table(report: Mapping[str, Any]) -> Table:
    """Render held-out success of a setting by step and arm, with summary rows below."""
    setting = report["setting"]
    title = "held-out success by step" + (f": {setting}" if setting else "")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title))
    table.add_column("step", justify="right", style="cyan")
    for arm in report["arms"]:
        table.add_column(title_of(arm), justify="right")
    for row in step_rows(report):
        table.add_row(*row)
    table.add_section()
    for row in summary_rows(report):
        table.add_row(*row)
    return table


def step_rows(report: Mapping[str, Any]) -> Rows:
    """Return the held-out success of each evaluated step, a column for each arm."""
    arms = report["arms"]
    curves = {arm: {point["step"]: point for point in arms[arm]["curve"]} for arm in arms}
    steps = sorted({step for points in curves.values() for step in points})
    return [[str(step), *(_share(curves[arm].get(step)) for arm in arms)] for step in steps]


def summary_rows(report: Mapping[str, Any]) -> Rows:
    """Return the rows that compare arms over the whole run."""
    arms = list(report["arms"].values())
    rows = [
        [f"steps to {report['target']:.0%}", *map(_steps, arms)],
        ["of each seed", *map(_steps_of_seeds, arms)],
        ["minus neither", *(_difference(arm["steps_minus_neither"]) for arm in arms)],
        ["mean over run", *(_share(arm["mean_over_run"]) for arm in arms)],
        ["minus neither", *(_points(arm["minus_neither"]) for arm in arms)],
        ["last", *(_share(arm["final"]) for arm in arms)],
        ["minus neither", *(_points(arm["final_minus_neither"]) for arm in arms)],
    ]
    for label, name, form in (
        ("tokens a point", "tokens", ",.0f"),
        ("seconds a point", "seconds", ",.2f"),
        ("$ a point", "usd", ".2g"),
    ):
        found = [(arm["cost"]["per_point"] or {}).get(name) for arm in arms]
        if any(found):
            rows.append([label, *("-" if one is None else f"{one:{form}}" for one in found)])
    return rows


def notes(report: Mapping[str, Any], usd_per_hour: float | None = None) -> Iterator[str]:
    """Yield notes on the table: the method, and runs that are not included."""
    yield (
        f"seeds {', '.join(map(str, report['seeds']))}; "
        f"{report['episodes']:,} held-out episodes every {report['eval_every']} steps"
    )
    yield report["interval"]
    yield (
        f"steps to {report['target']:.0%}: the first evaluation that reached it, median of seeds; "
        "minus neither: paired by seed, in percentage points or in steps, of which a run that "
        f"never reached {report['target']:.0%} counts all {report['steps']}"
    )
    yield (
        "a point: of success from the first to the last evaluation, sums over seeds; tokens are "
        "those of the policy loss, seconds those of steps, dollars those of teachers, hint writers "
        "and judges" + _priced(usd_per_hour)
    )
    for run in report["runs"]:
        if run["state"] != "finished":
            reason = f": {plain_text(run['reason'])}" if run["reason"] else ""
            yield f"not in the table: {run['arm']}, seed {run['seed']} {run['state']}{reason}"


def _priced(usd_per_hour: float | None) -> str:
    return "" if usd_per_hour is None else f", and of the machine at ${usd_per_hour:g} an hour"


def _share(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return "-"
    return f"{100 * estimate['mean']:.1f}%" + _interval(estimate["interval_95"], "", 100)


def _points(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return "-"
    return f"{100 * estimate['mean']:+.1f}" + _interval(estimate["interval_95"], "+", 100)


def _difference(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None or estimate["mean"] is None:
        return "-"
    return f"{estimate['mean']:+.1f}" + _interval(estimate["interval_95"], "+", 1)


def _interval(ends: Sequence[float] | None, sign: str, scale: int) -> str:
    if ends is None:
        return ""
    low, high = (scale * end for end in ends)
    return f" {low:{sign}.0f}..{high:{sign}.0f}"


def _steps(arm: Arm) -> str:
    steps = arm["steps_to_target"]
    return _step(steps["median"]) if steps["per_seed"] else "-"


def _steps_of_seeds(arm: Arm) -> str:
    return ", ".join(map(_step, arm["steps_to_target"]["per_seed"].values())) or "-"


def _step(step: float | None) -> str:
    return NEVER if step is None else f"{step:g}"
