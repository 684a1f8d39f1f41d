"""Speed-up of asynchronous training: rollouts that run ahead, weight syncs that overlap with steps.

    python benchmarks/async.py [--quick] [--json FILE]

Runs the real controller and rollout window with simulated durations of rollouts, training and
syncs, in simulated time: every run gives the same figures. Compares synchronous with `max_lag` 1, 2
and 4, and requests that continue with new weights with draining the generators before each update.
Last comes a short real run, in wall-clock time: the share of its weight syncs that no step waited
for.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from async_world import Durations, Outcome, simulate
from report import Report, arguments
from sync_hidden import measure

LAGS = (1, 2, 4)
CLAIMED = 2
"""The `max_lag` of the ratios `async_over_sync` and `inflight_over_drain`."""
LONG_TRAINING_S, LONG_LAG = 240.0, 4
"""Settings in which a step hardly waits for rollouts, so that only the sync is left to hide."""
FASTER, HIDDEN = 2.0, 0.9


@dataclass(frozen=True)
class Mean:
    """Outcomes averaged over several seeds."""

    outcomes: tuple[Outcome, ...]

    def of(self, name: str) -> float:
        return sum(getattr(one, name) for one in self.outcomes) / len(self.outcomes)

    @property
    def step_s(self) -> float:
        return self.of("step_s")

    def row(self, name: str, sync: "Mean") -> list[str]:
        """Return a row of the table."""
        lags = f"{self.of('lag_mean'):.2f}", f"{max(one.lag_max for one in self.outcomes)}"
        share = f"{self.of('hidden'):.0%}"
        return [name, f"{self.step_s:.0f}", f"{sync.step_s / self.step_s:.2f}x", *lags, share]


def main() -> int:
    """Simulate and measure; return 1 where a claim does not hold."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    steps, seeds, real_steps = (32, 1, 5) if given.quick else (60, 3, 14)
    report = Report("async")

    def run(max_lag: int, durations: Durations | None = None, **how: object) -> Mean:
        return Mean(
            tuple(
                simulate(durations or Durations(), max_lag, steps, seed=seed, **how)
                for seed in range(seeds)
            )
        )

    print(f"simulated, {steps} steps of 8 groups of 8, {seeds} seed(s): {Durations()}")
    simulated(report, run)
    real(report, real_steps)
    report.finish(given.json)
    held = report.ratios["async_over_sync"] >= FASTER
    return int(not (held and report.ratios["sync_time_hidden"] >= HIDDEN))


def simulated(report: Report, run: Callable[..., Mean]) -> None:
    """Run all simulations; report their tables and ratios."""
    sync = run(0)
    ahead = {lag: run(lag) for lag in LAGS}
    drained = {lag: run(lag, drains=True) for lag in LAGS}
    rows = [sync.row("synchronous", sync)]
    rows += [ahead[lag].row(f"max_lag {lag}", sync) for lag in LAGS]
    rows += [drained[lag].row(f"max_lag {lag}, drained", sync) for lag in LAGS]
    table(report, "rollouts are the bottleneck", rows)
    long = replace(Durations(), train=LONG_TRAINING_S)
    trains, after, beside = run(0, long), run(LONG_LAG, long, exposes=True), run(LONG_LAG, long)
    name = f"max_lag {LONG_LAG}"
    rows = [trains.row("synchronous", trains), after.row(f"{name}, sync waited for", trains)]
    table(report, f"training ({long.train:g} s) is", [*rows, beside.row(name, trains)])
    for lag in LAGS:
        report.figures[f"async_over_sync_max_lag_{lag}"] = sync.step_s / ahead[lag].step_s
        report.figures[f"inflight_over_drain_max_lag_{lag}"] = (
            drained[lag].step_s / ahead[lag].step_s
        )
    report.figures["beside_over_after"] = after.step_s / beside.step_s
    report.ratios["async_over_sync"] = sync.step_s / ahead[CLAIMED].step_s
    report.ratios["inflight_over_drain"] = drained[CLAIMED].step_s / ahead[CLAIMED].step_s


def table(report: Report, title: str, rows: Iterable[list[str]]) -> None:
    columns = ["", "s a step", "faster", "mean lag", "max lag", "sync hidden"]
    report.print_table(title, columns, list(rows))


def real(report: Report, steps: int) -> None:
    """Report the real run on this machine."""
    found = measure(steps)
    for name in ("step_s", "sync_s", "exposed_s"):
        report.figures[f"real_{name}"] = getattr(found, name)
    row = [f"{value:.3f}" for value in (found.step_s, found.sync_s, found.exposed_s)]
    columns = ["a real run, max_lag 1", "s a step", "s a sync", "waited for", "hidden"]
    title = "100 MB of weights, one trainer, one generator"
    report.print_table(title, columns, [["median", *row, f"{found.share:.1%}"]])
    report.ratios["sync_time_hidden"] = found.share


if __name__ == "__main__":
    sys.exit(main())
