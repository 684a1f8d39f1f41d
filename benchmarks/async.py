"""Speed-up of asynchronous training: rollouts that run ahead, weight syncs that overlap with steps.

    python benchmarks/async.py [--quick] [--json FILE]

Runs the real controller and rollout window with simulated durations of rollouts, training and
syncs, in simulated time: every run gives the same figures. Compares synchronous with `max_lag` 1, 2
and 4, and requests that continue with new weights with draining the generators before each update.
Then some groups take 30 times as long, and steps wait for them or pass over them (carried_groups).
Last comes a short real run, in wall-clock time: the share of its weight syncs that no step waited
for.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from async_world import Durations, Outcome, simulate
from report import Report, arguments

from composer_mesh.services.directory.report import read_metrics

LAGS = (1, 2, 4)
CLAIMED = 2
"""The `max_lag` of the ratios `async_over_sync` and `inflight_over_drain`."""
LONG_TRAINING_S, LONG_LAG = 240.0, 4
"""Settings in which a step hardly waits for rollouts, so that only the sync is left to hide."""
FASTER, HIDDEN = 2.0, 0.9
SLOW_SHARE, CARRIED, TOKEN_AGE = 0.05, 16, 8
"""Share of the groups that take `slow_times` as long; how many of them steps may pass over."""
PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
SETTINGS = {
    "policy.hidden_size": 512,
    "policy.intermediate_size": 1536,
    "policy.layers": 8,
    "policy.heads": 8,
    "policy.head_dim": 64,
    "policy.warm_start.steps": 0,
    "generator.max_new_tokens": 16,
    "generator.replicas": 1,
    "environment.replicas": 1,
    "environment.max_turns": 2,
    "schedule.prompts_per_step": 4,
    "schedule.group_size": 2,
    "schedule.max_lag": 1,
    "trainer.checkpoint_every": 0,
    "sdpo.alpha": 0,
    "replay.beta": 0,
    "eval.episodes": 1,
}
"""Of the real run."""


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
    trains, after, overlapped = run(0, long), run(LONG_LAG, long, exposes=True), run(LONG_LAG, long)
    name = f"max_lag {LONG_LAG}"
    rows = [trains.row("synchronous", trains), after.row(f"{name}, sync waited for", trains)]
    table(report, f"training ({long.train:g} s) is", [*rows, overlapped.row(name, trains)])
    tail = replace(Durations(), slow_share=SLOW_SHARE)
    waits = run(CLAIMED, tail)
    passes = run(CLAIMED, tail, carried=CARRIED, max_token_age=TOKEN_AGE)
    name = f"max_lag {CLAIMED}"
    rows = [waits.row(name, waits), passes.row(f"{name}, carried_groups {CARRIED}", waits)]
    table(report, f"{SLOW_SHARE:.0%} of the groups take {tail.slow_times:g} times as long", rows)
    report.figures["carried_tokens_aged"] = passes.of("aged")
    report.ratios["carried_over_waiting"] = waits.step_s / passes.step_s
    for lag in LAGS:
        report.figures[f"async_over_sync_max_lag_{lag}"] = sync.step_s / ahead[lag].step_s
        report.figures[f"inflight_over_drain_max_lag_{lag}"] = (
            drained[lag].step_s / ahead[lag].step_s
        )
    report.figures["beside_over_after"] = after.step_s / overlapped.step_s
    report.ratios["async_over_sync"] = sync.step_s / ahead[CLAIMED].step_s
    report.ratios["inflight_over_drain"] = drained[CLAIMED].step_s / ahead[CLAIMED].step_s


def table(report: Report, title: str, rows: Iterable[list[str]]) -> None:
    columns = ["", "s a step", "faster", "mean lag", "max lag", "sync hidden"]
    report.print_table(title, columns, list(rows))


def real(report: Report, steps: int) -> None:
    """Report the share of the syncs' time that overlaps with steps of a real run on this machine.

    It has a model of 25 million random weights, with rollouts and steps to match. The first step
    overlaps with no sync, and the last sync with no step.
    """
    with TemporaryDirectory(prefix="async-") as folder:
        output = Path(folder) / "run"
        settings = {**SETTINGS, "run.steps": steps, "policy.cache_dir": Path(folder) / "policies"}
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "composer_mesh", "train", str(PRESET), *given]
        ended = subprocess.run(
            [*command, "--output", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"the run ended with {ended.returncode}: {ended.stderr[-2000:]}")
        found = read_metrics(output / "metrics.jsonl")[1:-1]
    keys = {"step": "step", "sync": "weight_sync_total", "exposed": "weight_sync"}
    seconds = {name: [float(one[f"time/{key}_s"]) for one in found] for name, key in keys.items()}
    middle = {f"real_{name}_s": statistics.median(took) for name, took in seconds.items()}
    share = 1 - sum(seconds["exposed"]) / sum(seconds["sync"])
    report.figures |= middle
    report.ratios["sync_time_hidden"] = share
    row = ["median", *(f"{value:.3f}" for value in middle.values()), f"{share:.1%}"]
    columns = ["a real run, max_lag 1", "s a step", "s a sync", "waited for", "hidden"]
    report.print_table("100 MB of weights, one trainer, one generator", columns, [row])


if __name__ == "__main__":
    sys.exit(main())
