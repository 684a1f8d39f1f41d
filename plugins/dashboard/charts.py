"""Charts as SVG text, sparklines, and which charts a run and a comparison have.

Widths are shares of what the page has, heights are pixels, so that a chart fits any screen and its
text keeps its size. Everything that is written into the text is a number of ours or is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.series import AXIS_TITLES, Axis, Columns, Curve, curve
from composer_mesh.services.directory.report import Evaluation

HEIGHT, TOP, BOTTOM, LEFT = 190, 10, 22, 42
INNER = 1000
"""Units of the width of the lines, which are stretched to the width of the page."""
TICKS = 4
COLOURS = 8


@dataclass(frozen=True)
class Chart:
    """A chart: its title, what its numbers are, and its curves; `low` and `high` bound its axis.

    One with `costs` is empty where nothing was paid.
    """

    title: str
    curves: Sequence[Curve]
    x_title: str = "optimizer step"
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    costs: bool = False

    @property
    def empty(self) -> bool:
        if self.costs:
            return not any(y for one in self.curves for y in one.ys)
        return not any(one.xs for one in self.curves)

    def svg(self) -> Markup:
        """Draw it."""
        if self.empty:
            return Markup('<p class="nothing">nothing yet</p>')
        xs = [x for one in self.curves for x in one.xs]
        low, high = self._range()
        x_low, x_high = _span(min(xs), max(xs))
        place = _Place(x_low, x_high, low, high)
        height = HEIGHT - TOP - BOTTOM
        dotted = [one for one in self.curves if one.dots or len(one.xs) == 1]
        parts = [
            f'<div class="plots"><svg class="axis" width="{LEFT}" height="{HEIGHT}" '
            'aria-hidden="true">',
            *self._numbers(place),
            f'</svg><svg class="plot" width="100%" height="{HEIGHT}" role="img" '
            f'aria-label="{escape(self.text_alternative())}">',
            *self._grid(place),
            f'<svg y="{TOP}" width="100%" height="{height}" viewBox="0 0 {INNER} {INNER}" '
            'preserveAspectRatio="none">',
            *(part for one in self.curves for part in _drawn(one, place)),
            "</svg>",
            *(dot for one in dotted for dot in _dots(one, place)),
            "</svg></div>",
        ]
        return Markup("".join(parts))

    def points(self) -> str:
        """Return what the script shows under the pointer, as JSON."""
        return json.dumps(
            [
                {
                    "label": one.label,
                    "colour": one.colour % COLOURS,
                    "xs": [_short(x) for x in one.xs],
                    "ys": [_short(y) for y in one.ys],
                }
                for one in self.curves
                if one.xs
            ]
        )

    def last(self) -> str:
        """Return the last value of a chart of one curve."""
        known = [one for one in self.curves if one.ys]
        return figure(known[0].ys[-1]) + self.unit if len(known) == 1 else ""

    def median(self) -> str:
        """Return the recent median of a chart of one curve."""
        known = [one for one in self.curves if one.ys]
        return recent(known[0], self.unit) if len(known) == 1 else ""

    def text_alternative(self) -> str:
        """Return the chart in words."""
        parts = [
            f"{one.label}: from {figure(one.ys[0])} to {figure(one.ys[-1])}"
            for one in self.curves
            if one.ys
        ]
        return f"{self.title} by {self.x_title}. " + "; ".join(parts)

    def _range(self) -> tuple[float, float]:
        values = [y for one in self.curves for y in one.ys]
        values += [end for one in self.curves for band in one.bands for end in band]
        low = min(values) if self.low is None else min(self.low, *values)
        high = max(values) if self.high is None else max(self.high, *values)
        return _span(low, high)

    def _numbers(self, place: _Place) -> list[str]:
        """Return the numbers at the left."""
        return [
            f'<text class="tick" x="{LEFT - 7}" y="{place.pixel(tick) + 4:.1f}" '
            f'text-anchor="end">{figure(tick)}</text>'
            for tick in ticks(place.low, place.high)
        ]

    def _grid(self, place: _Place) -> list[str]:
        """Return the lines across, and the numbers below."""
        heights = [place.pixel(tick) for tick in ticks(place.low, place.high)]
        parts = [f'<line class="grid" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights]
        for tick in ticks(place.x_low, place.x_high, 5):
            share = place.x(tick) / INNER * 100
            anchor = "start" if share < 3 else "end" if share > 95 else "middle"
            parts.append(
                f'<text class="tick" x="{share:.2f}%" y="{HEIGHT - 6}" text-anchor="{anchor}">'
                f"{figure(tick)}</text>"
            )
        return parts


@dataclass(frozen=True)
class _Place:
    x_low: float
    x_high: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return INNER * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return INNER * (1 - (value - self.low) / (self.high - self.low))

    def pixel(self, value: float) -> float:
        """Return the height of a value in pixels from the top of the chart."""
        return TOP + self.y(value) * (HEIGHT - TOP - BOTTOM) / INNER


def _drawn(one: Curve, place: _Place) -> list[str]:
    if not one.xs:
        return []
    shape = " ".join(
        f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in zip(one.xs, one.ys, strict=True)
    )
    parts = []
    if one.bands:
        lows = [
            f"{place.x(x):.1f},{place.y(b[0]):.1f}" for x, b in zip(one.xs, one.bands, strict=True)
        ]
        highs = [
            f"{place.x(x):.1f},{place.y(b[1]):.1f}" for x, b in zip(one.xs, one.bands, strict=True)
        ]
        around = " ".join(lows + highs[::-1])
        parts.append(f'<polygon class="band k{one.colour % COLOURS}" points="{around}"/>')
    parts.append(f'<polyline class="line k{one.colour % COLOURS}" points="{shape}"/>')
    return parts


def _dots(one: Curve, place: _Place) -> list[str]:
    return [
        f'<circle class="dot k{one.colour % COLOURS}" cx="{place.x(x) / INNER * 100:.2f}%" '
        f'cy="{place.pixel(y):.1f}" r="3.5"/>'
        for x, y in zip(one.xs, one.ys, strict=True)
    ]


def sparkline(values: Sequence[float]) -> Markup:
    """Draw values from 0 to 1, or as far as they go, as a small line; decoration, so not spoken."""
    if len(values) < 2:
        return Markup("")
    low, high = _span(min(0.0, *values), max(1.0, *values))
    step = 100 / (len(values) - 1)
    shape = " ".join(
        f"{place * step:.1f},{26 - 24 * (value - low) / (high - low):.1f}"
        for place, value in enumerate(values)
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 100 28" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{shape}"/></svg>'
    )


def ticks(low: float, high: float, most: int = TICKS) -> list[float]:
    """Return round numbers between two bounds, at most `most` + 1 of them."""
    rough = (high - low) / most
    scale = 10 ** math.floor(math.log10(rough))
    step = next((scale * one for one in (1, 2, 2.5, 5, 10) if scale * one >= rough), rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def recent(one: Curve, unit: str = "") -> str:
    """Format a curve's recent median; empty without one."""
    return "" if one.median is None else f"median {figure(one.median)}{unit}"


def figure(value: float) -> str:
    """Format a number in few characters: 1.2k, 0.034, 12."""
    size = abs(value)
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{value / (bound if unit != 'k' else 1e3):.3g}{unit}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _span(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-12 * max(1.0, abs(high)):
        return low, high
    if not high:
        return 0.0, 1.0
    return low - abs(high) / 2, high + abs(high) / 2


def _short(value: float) -> float:
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Spec:
    """A chart: its figures with their labels, of which a comparison draws the first."""

    title: str
    keys: tuple[tuple[str, str], ...]
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    costs: bool = False


SPECS = (
    Spec("Reward", (("reward/mean", "mean reward of a step"),), low=0.0, high=1.0),
    Spec("Policy loss", (("loss/policy", "GRPO loss"),)),
    Spec("SDPO loss", (("loss/sdpo", "JSD at error sites"),)),
    Spec("Replay loss", (("loss/replay", "DPO loss"),)),
    Spec(
        "Error sites",
        (("rollouts/error_sites_each", "sites of a rollout"),),
        low=0.0,
        note="failed turns of a rollout, mean",
    ),
    Spec(
        "Flagged rollouts",
        (("reward/of/flagged", "share of a step's rollouts"),),
        low=0.0,
        high=1.0,
        note="by the monitor of the task",
    ),
    Spec(
        "Teacher pairs",
        (("replay/pair_share", "states with a pair"),),
        low=0.0,
        high=1.0,
        note="share of the decided states that gave a pair",
    ),
    Spec(
        "Sampled tokens",
        (("rollouts/tokens", "tokens of a rollout"),),
        low=0.0,
        note="mean over the step's rollouts",
    ),
    Spec(
        "Entropy",
        (("rollouts/entropy", "nats a token"),),
        low=0.0,
        note="mean of -log p of the sampled tokens",
    ),
    Spec("Policy lag", (("lag/mean", "mean"), ("lag/max", "largest")), low=0.0, note="versions"),
    Spec("Throughput", (("tokens/per_s", "tokens trained a second"),), low=0.0, unit=" tok/s"),
    Spec(
        "Seconds of a step",
        (
            ("time/step_s", "step"),
            ("time/train_s", "train"),
            ("time/wait_batch_s", "wait for rollouts"),
            ("time/weight_sync_s", "wait for weights"),
        ),
        low=0.0,
        unit=" s",
    ),
    Spec("Weight sync", (("time/weight_sync_total_s", "seconds of syncs"),), low=0.0, unit=" s"),
    Spec(
        "Log-prob mismatch",
        (("logprob_mismatch/mean", "mean"), ("logprob_mismatch/max", "largest")),
        low=0.0,
        note="|trainer - generator|, nats",
    ),
    Spec("Gradient norm", (("policy/grad_norm", "before clipping"),), low=0.0),
    Spec("Dollars", (("usd/total", "teachers and judges"),), low=0.0, costs=True),
)
SUCCESS = "Held-out success"


def charts_of_run(
    columns: Columns, evaluations: Sequence[Evaluation], axis: Axis, smoothing: float
) -> list[Chart]:
    """Return the charts of one run; those without a figure are left out."""
    held_out = _success([("held-out", columns, evaluations, 0)], axis)
    drawn = [
        [(label, columns, key, colour) for colour, (key, label) in enumerate(spec.keys)]
        for spec in SPECS
    ]
    return _charts(held_out, drawn, axis, smoothing)


def charts_of_runs(
    runs: Sequence[tuple[RunSummary, Columns]], axis: Axis, smoothing: float
) -> list[Chart]:
    """Return the charts of a comparison, one curve for each run."""
    about = [(run.name, columns, run.evaluations, n) for n, (run, columns) in enumerate(runs)]
    drawn = [
        [(name, columns, spec.keys[0][0], colour) for name, columns, _, colour in about]
        for spec in SPECS
    ]
    return _charts(_success(about, axis), drawn, axis, smoothing)


def _charts(
    held_out: Chart,
    drawn: Sequence[Sequence[tuple[str, Columns, str, int]]],
    axis: Axis,
    smoothing: float,
) -> list[Chart]:
    """Return the charts with a figure: rewards, held-out success, then the other ones.

    `drawn` has label, columns, key and colour of each curve of each chart.
    """
    reward, *others = (
        _chart(
            spec,
            [
                curve(label, columns.axis(axis), columns.column(key), colour, smoothing)
                for label, columns, key, colour in curves
            ],
            axis,
        )
        for spec, curves in zip(SPECS, drawn, strict=True)
    )
    return [chart for chart in (reward, held_out, *others) if not chart.empty]


def _chart(spec: Spec, curves: Sequence[Curve], axis: Axis) -> Chart:
    title = AXIS_TITLES[axis]
    bounds = spec.low, spec.high
    return Chart(spec.title, curves, title, spec.unit, *bounds, spec.note, spec.costs)


def _success(runs: Sequence[tuple[str, Columns, Sequence[Evaluation], int]], axis: Axis) -> Chart:
    curves = []
    for name, columns, evaluations, colour in runs:
        placed = dict(zip(columns.steps, columns.axis(axis), strict=False))
        known = [one for one in evaluations if one.step in placed or one.step == 0]
        curves.append(
            Curve(
                name,
                [placed.get(one.step, 0.0) for one in known],
                [one.success for one in known],
                colour,
                [one.interval for one in known],
                dots=True,
            )
        )
    note = "share of held-out episodes, with its 95 % interval"
    return Chart(SUCCESS, curves, AXIS_TITLES[axis], "", 0.0, 1.0, note)
