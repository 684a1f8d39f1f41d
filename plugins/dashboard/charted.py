"""Which charts a run and a comparison have, and the figures in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.charts import Chart
from composer_mesh.plugins.dashboard.series import AXIS_TITLES, Axis, Columns, Curve, curve
from composer_mesh.services.directory.report import Evaluation


@dataclass(frozen=True)
class Spec:
    """A chart: its figures with their labels, of which a comparison draws the first."""

    title: str
    keys: tuple[tuple[str, str], ...]
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""


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
        "Teacher agreement",
        (("replay/agreement", "states with a pair"),),
        low=0.0,
        high=1.0,
        note="share of the states asked about that gave a pair",
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
    Spec("Dollars", (("usd/total", "teachers and judges"),), low=0.0),
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
    return Chart(spec.title, curves, title, spec.unit, spec.low, spec.high, spec.note)


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
