"""The report page of an ablation: `ablation.md`, with its tables and the pictures next to it.

The tables are rows of text, for a terminal too. One picture has held-out success by step, with a
curve and a band for each arm; the other has the success after the last step over a difficulty, in
panels of settings that differ in nothing else. They draw the contents of `ablation.json` with
matplotlib objects and no global state.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.ablation.plan import BASELINE
from composer_mesh.plugins.ablation.report import settings_of
from composer_mesh.services.inspection.page import plain_text

NEVER = "never"

Arm = Mapping[str, Any]
Rows = list[list[str]]


def title_of(arm: str) -> str:
    """Return the heading of an arm: that of a single channel is its name with a plus."""
    return arm if arm in ("neither", "both") else f"+{arm}"


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
    return [[str(step), *(_estimate(curves[arm].get(step)) for arm in arms)] for step in steps]


def summary_rows(report: Mapping[str, Any]) -> Rows:
    """Return the rows that compare arms over the whole run."""
    arms = list(report["arms"].values())
    rows = [
        [f"steps to {report['target']:.0%}", *map(_steps, arms)],
        ["of each seed", *map(_steps_of_seeds, arms)],
        ["minus neither", *(_estimate(arm["steps_minus_neither"], "+", 1) for arm in arms)],
        ["mean over run", *(_estimate(arm["mean_over_run"]) for arm in arms)],
        ["minus neither", *(_estimate(arm["minus_neither"], "+") for arm in arms)],
        ["last", *(_estimate(arm["final"]) for arm in arms)],
        ["minus neither", *(_estimate(arm["final_minus_neither"], "+") for arm in arms)],
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


def _estimate(estimate: Mapping[str, Any] | None, sign: str = "", scale: int = 100) -> str:
    """Format a mean and its interval: as a share in percent, or with `sign` as a difference."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    shown = f"{scale * estimate['mean']:{sign}.1f}" + ("" if sign else "%")
    if estimate["interval_95"] is None:
        return shown
    low, high = (scale * end for end in estimate["interval_95"])
    return f"{shown} {low:{sign}.0f}..{high:{sign}.0f}"


def _steps(arm: Arm) -> str:
    steps = arm["steps_to_target"]
    return _step(steps["median"]) if steps["per_seed"] else "-"


def _steps_of_seeds(arm: Arm) -> str:
    return ", ".join(map(_step, arm["steps_to_target"]["per_seed"].values())) or "-"


def _step(step: float | None) -> str:
    return NEVER if step is None else f"{step:g}"


PICTURE_FILE = "ablation.png"
INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLORS = {"neither": "#52606d", "sdpo": "#7c3aed", "replay": "#059669", "both": "#d97706"}
OTHER = "#0e7490"


def color_of(arm: str) -> str:
    """Return the color of an arm."""
    return COLORS.get(arm, OTHER)


def draw_ablation(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path` atomically; an arm without a finished run has no curve."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(9, 7.5), dpi=150, layout=layout, facecolor="white")
    grid = figure.add_gridspec(2, len(report["arms"]), height_ratios=(2.2, 1))
    _draw_means(figure.add_subplot(grid[0, :]), report)
    for column, arm in enumerate(report["arms"]):
        _draw_arm(figure.add_subplot(grid[1, column]), arm, report)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_whole(path, picture.getvalue())


def _draw_means(axes: Axes, report: Mapping[str, Any]) -> None:
    """Plot the means of all arms together, without bands, which would overlap."""
    for arm in report["arms"]:
        label = f"{title_of(arm)}: {_reached(report, arm)}"
        _plot_mean(axes, arm, report, label=label, marker="o", markersize=4, linewidth=2.4)
    _finish(axes, report)
    axes.set_ylabel("held-out success", color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    seeds, episodes = ", ".join(map(str, report["seeds"])), report["episodes"]
    axes.set_title(
        f"Held-out success by channel: mean of seeds {seeds}; {episodes:,} episodes each",
        loc="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)


def _draw_arm(axes: Axes, arm: str, report: Mapping[str, Any]) -> None:
    """Plot one arm with its 95 % band and its seeds, over the baseline's mean."""
    color, points = color_of(arm), report["arms"][arm]["curve"]
    if points:
        low, high = zip(*(point["interval_95"] for point in points), strict=True)
        steps = [point["step"] for point in points]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    for run in report["runs"]:
        if run["arm"] == arm and run["state"] == "finished":
            own = [(e["step"], e["success"]) for e in run["evaluations"]]
            axes.plot(*zip(*own, strict=True), color=color, alpha=0.5, linewidth=0.8)
    if arm != BASELINE and BASELINE in report["arms"]:
        _plot_mean(axes, BASELINE, report, linewidth=1.2, linestyle=(0, (2, 2)))
    _plot_mean(axes, arm, report, linewidth=2)
    _finish(axes, report)
    axes.tick_params(labelsize=8)
    axes.set_title(f"{title_of(arm)}, 95 % band", loc="left", fontsize=10, color=color)


def _plot_mean(axes: Axes, arm: str, report: Mapping[str, Any], **style: Any) -> None:
    if points := report["arms"][arm]["curve"]:
        steps, means = [p["step"] for p in points], [p["mean"] for p in points]
        axes.plot(steps, means, color=color_of(arm), clip_on=False, **style)


def _reached(report: Mapping[str, Any], arm: str) -> str:
    steps = report["arms"][arm]["steps_to_target"]
    seeds = f"median of {len(steps['per_seed'])}"
    if steps["median"] is None:
        return f"{report['target']:.0%} not reached ({seeds})"
    return f"{report['target']:.0%} after {steps['median']:g} steps ({seeds})"


def _finish(axes: Axes, report: Mapping[str, Any]) -> None:
    axes.axhline(report["target"], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(0, report["steps"])
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins="auto"))


DIFFICULTY_FILE = "difficulty.png"

Panels = dict[str, list[Mapping[str, Any]]]


def panels_of(report: Mapping[str, Any]) -> Panels:
    """Return the settings of each panel, by difficulty, under what the panel has in common."""
    key = report["difficulty"]
    configs = {one["config"] for one in report["settings"]}
    panels: Panels = {}
    for one in report["settings"]:
        rest = [f"{name} = {value}" for name, value in one["values"].items() if name != key]
        title = ", ".join([*([one["config"]] if len(configs) > 1 else []), *rest])
        panels.setdefault(title, []).append(one)
    return {
        title: sorted(settings, key=lambda one: float(one["values"][key]))
        for title, settings in panels.items()
    }


def draw_difficulty(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path` atomically; a setting without a finished run has no point."""
    panels = panels_of(report)
    figure = Figure(
        figsize=(6 * len(panels), 4.5), dpi=150, layout="constrained", facecolor="white"
    )
    rows = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, settings) in zip(rows, panels.items(), strict=True):
        _draw_panel(axes, title, settings, report["difficulty"])
    _write(figure, path)


def _draw_panel(axes: Axes, title: str, settings: list[Mapping[str, Any]], key: str) -> None:
    for arm in settings[0]["arms"]:
        found = [(float(one["values"][key]), one["arms"][arm]["curve"]) for one in settings]
        points = [(value, points[-1]) for value, points in found if points]
        if not points:
            continue
        at, ends = [value for value, _ in points], [point["interval_95"] for _, point in points]
        means = [point["mean"] for _, point in points]
        low, high = zip(*ends, strict=True)
        axes.fill_between(at, low, high, color=color_of(arm), alpha=0.1, linewidth=0)
        axes.plot(at, means, color=color_of(arm), marker="o", linewidth=2, label=title_of(arm))
    axes.set_ylim(-0.02, 1.02)
    named = {float(one["values"][key]): str(one["values"][key]) for one in settings}
    axes.set_xticks(sorted(named), [named[value] for value in sorted(named)])
    axes.set_xlabel(key, color=INK)
    axes.set_title(title or "held-out success after the last step", loc="left", color=INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


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
