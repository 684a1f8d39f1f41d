"""Plot of an ablation over a difficulty: held-out success after the last step, a curve an arm.

A panel holds the settings that differ in nothing but the difficulty.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.ablation.curve import INK, color_of
from composer_mesh.plugins.ablation.tables import title_of

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
    canvas = FigureCanvasAgg(figure)
    rows = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, settings) in zip(rows, panels.items(), strict=True):
        _draw_panel(axes, title, settings, report["difficulty"])
    picture = io.BytesIO()
    canvas.print_png(picture)
    write_whole(path, picture.getvalue())


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
