"""Reward curve of a run as a PNG: reward, held-out success, deaths, and each channel's loss.

Draws with matplotlib objects and no global state, so it needs no display.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.services.directory.channel_activity import channels_of
from composer_mesh.services.directory.report import Evaluation

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
MARGIN = 0.1  # share of the steps, left and right of the curve
REWARD, SUCCESS, DEATH = "#2563eb", "#d97706", "#dc2626"
MOST_DEATHS, MOST_LABELS = 200, 8
ABOVE_LEGEND = 0.29
"""Height of the lower end of names, as a share of the axes."""
CHANNEL_COLORS = {"policy": "#2563eb", "sdpo": "#7c3aed", "replay": "#059669"}
CHANNEL_TITLES = {
    "policy": "policy loss (GRPO)",
    "sdpo": "sdpo loss (JSD)",
    "replay": "replay loss (DPO)",
}


@dataclass(frozen=True)
class Death:
    """A process that died after `step` optimizer steps, such as `generator-1 killed`."""

    step: int
    label: str


def draw_reward_curve(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    evaluations: Sequence[Evaluation] = (),
    deaths: Sequence[Death] = (),
    title: str = "Reward over the run",
) -> None:
    """Write the curve to `path`; a channel that was off in a step leaves a gap there.

    Of very many deaths the first `MOST_DEATHS` are marked, and `MOST_LABELS` at most are named.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(9, 6), dpi=150, layout=layout, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    channels = channels_of(metrics)
    grid = figure.add_gridspec(2, len(channels), height_ratios=(2.3, 1))
    reward = figure.add_subplot(grid[0, :])
    _draw_deaths(reward, deaths)
    _draw_reward(reward, metrics, evaluations, title)
    for column, channel in enumerate(channels):
        _draw_channel(figure.add_subplot(grid[1, column]), metrics, channel)
    last = max([1, *(int(step["step"]) for step in metrics), *(e.step for e in evaluations)])
    for axes in figure.axes:
        axes.set_xlim(-MARGIN * last, (1 + MARGIN) * last)
    picture = io.BytesIO()
    canvas.print_png(picture)
    with OpenFolder(path.parent) as folder:
        folder.write_whole(path.name, picture.getvalue())


def smoothed(values: Sequence[float], radius: int) -> list[float]:
    """Return the centred moving average over `radius` steps to each side, ignoring NaN."""
    windows = (values[max(0, i - radius) : i + radius + 1] for i in range(len(values)))
    return [_mean([v for v in window if not math.isnan(v)]) for window in windows]


def _draw_reward(
    axes: Axes, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation], title: str
) -> None:
    steps, rewards = _series(metrics, "reward/mean")
    axes.plot(steps, rewards, ".", color=REWARD, alpha=0.3, markersize=6, label="reward of a step")
    radius = max(1, len(steps) // 20)
    axes.plot(
        steps,
        smoothed(rewards, radius),
        color=REWARD,
        linewidth=2.2,
        label=f"reward, mean of {2 * radius + 1} steps",
    )
    _draw_evaluations(axes, evaluations)
    floor = min([0.0, *(r for r in rewards if not math.isnan(r))])
    axes.set_ylim(floor - 0.03, max([1.0, *(r for r in rewards if not math.isnan(r))]) + 0.06)
    _finish(axes)
    # A run's name may contain $, which would be parsed as a formula.
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    axes.set_ylabel("reward · success (share)", color=INK)
    axes.set_xlabel("optimizer step", color=INK)
    axes.legend(
        loc="lower right", fontsize=9, labelcolor=INK, edgecolor="none", framealpha=1, borderpad=0
    )


def _draw_deaths(axes: Axes, deaths: Sequence[Death]) -> None:
    """Draw a line in the step in which each process died, with its name along it."""
    for number, death in enumerate(deaths[:MOST_DEATHS]):
        label = None if number else "a process died"
        axes.axvline(
            death.step + 0.5, color=DEATH, linewidth=1.3, linestyle=(0, (4, 3)), label=label
        )
        if len(deaths) <= MOST_LABELS:
            axes.annotate(
                death.label,
                (death.step + 0.5, ABOVE_LEGEND),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                fontsize=9,
                color=DEATH,
                parse_math=False,
            )


def _draw_evaluations(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    """Plot held-out success with its 95 % interval and its value."""
    if not evaluations:
        return
    low = [e.success - e.interval[0] for e in evaluations]
    high = [e.interval[1] - e.success for e in evaluations]
    axes.errorbar(
        [e.step for e in evaluations],
        [e.success for e in evaluations],
        yerr=[[max(0.0, x) for x in low], [max(0.0, x) for x in high]],
        fmt="D",
        color=SUCCESS,
        markersize=7,
        capsize=4,
        linewidth=1.5,
        zorder=5,
        label=f"held-out success, {evaluations[-1].episodes} episodes, 95 % interval",
    )
    for number, evaluation in enumerate(evaluations):
        # Labels are next to the curve: the first to the left, the others to the right.
        offset, side = ((-9, "right"), (9, "left"))[number > 0]
        axes.annotate(
            f"{evaluation.success:.1%}",
            (evaluation.step, evaluation.success),
            xytext=(offset, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            color=SUCCESS,
            fontweight="bold",
        )


def _draw_channel(axes: Axes, metrics: Sequence[Mapping[str, Any]], channel: str) -> None:
    steps, losses = _series(metrics, f"loss/{channel}")
    color = CHANNEL_COLORS.get(channel, SUCCESS)
    axes.plot(steps, losses, color=color, linewidth=1.4, marker=".", markersize=2.5)
    if all(math.isnan(loss) for loss in losses):
        axes.text(0.5, 0.5, "off", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set_yticks([])
    _finish(axes)
    axes.set_title(
        CHANNEL_TITLES.get(channel, f"{channel} loss"), loc="left", fontsize=10, color=color
    )
    axes.set_xlabel("optimizer step", color=INK, fontsize=9)
    axes.tick_params(labelsize=8)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one key; missing values are NaN, a gap in the line."""
    found = [step.get(key) for step in metrics]
    return [int(step["step"]) for step in metrics], [math.nan if v is None else v for v in found]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
