"""Plot of an ablation: held-out success by step, with a curve and a band for each arm.

Draws the contents of `ablation.json` with matplotlib objects and no global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.ablation.plan import BASELINE
from composer_mesh.plugins.ablation.tables import title_of

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
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(report["arms"]), height_ratios=(2.2, 1))
    _draw_means(figure.add_subplot(grid[0, :]), report)
    for column, arm in enumerate(report["arms"]):
        _draw_arm(figure.add_subplot(grid[1, column]), arm, report)
    picture = io.BytesIO()
    canvas.print_png(picture)
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
