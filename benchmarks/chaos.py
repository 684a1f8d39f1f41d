"""A run under injected faults: detection and recovery times, and whether anything is lost.

    python benchmarks/chaos.py [--quick] [--seed N] [--faults N] [--output DIR] [--json FILE]
    python benchmarks/chaos.py --kinds rollouts [--quick] [--seed N] [--faults N] [--json FILE]
    python benchmarks/chaos.py --hosts [--quick] [--seed N] [--faults N] [--json FILE]
    python benchmarks/chaos.py --controller 10 [--json FILE]

Two quickstart runs of the same seed, one without faults and one under a seeded schedule of faults
on every kind of actor: SIGKILL, SIGSTOP, an exception in an endpoint, os._exit, a memory limit, cut
connections; alone, in bursts, and during weight syncs. Both are judged by their files: what was
lost, which tokens contradict their recorded version, how long the run stalled, how well it learned.
With --kinds, only actors of these kinds are struck.
With --hosts, the same on two hosts, each in its own network namespace: from time to time one is
killed, hangs, or is cut off, and another joins. With --controller, SIGKILL of the controller at
random moments of as many runs: what remains after 10 s. The exit status is 1 where a claim fails.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("COLUMNS", "110")

from chaos_hosts import hosts_struck  # noqa: E402
from chaos_inject import Ended, Injector, run_through  # noqa: E402
from chaos_judge import fill_report, holds, judge, print_tables, write_outcomes  # noqa: E402
from chaos_outcomes import percentile  # noqa: E402
from chaos_run import LiveRun, launched  # noqa: E402
from chaos_schedule import KINDS, Planned, schedule  # noqa: E402
from cut_net import NotPermitted  # noqa: E402
from report import Report, arguments  # noqa: E402

SETTINGS: dict[str, Any] = {
    "generator.replicas": 2,
    "environment.replicas": 2,
    "rollouts.workers": 2,
    "sdpo.hints.writer": "llm",
    "sdpo.hints.llm": '{kind="builtin"}',
    "trainer.checkpoint_every": 5,
    # Dozens of faults on a dozen processes exceed the wear that the defaults are for.
    "supervision.heartbeat_s": 1.0,
    "supervision.hang_s": 10.0,
    "supervision.restarts": 100,
    "supervision.backoff_s": 0.2,
    "supervision.backoff_max_s": 2.0,
    "supervision.rollout_retries": 10,
    "supervision.trainer_restarts": 100,
}
FULL: dict[str, Any] = {"run.steps": 70, "eval.episodes": 400}
QUICK: dict[str, Any] = {
    "run.steps": 24,
    "schedule.prompts_per_step": 4,
    "eval.episodes": 100,
    "trainer.checkpoint_every": 3,
}

GRACE_S = 10.0
POLL_S = 0.02
SPAN_S = 30.0
"""Moments are random within this from the start of the command, or from the end of its first
step: one half each, because a busy machine starts slowly."""
FIRST_STEP_BOUND_S = 900.0


def main() -> int:
    given = _arguments()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # so that runs end with this process
    report = Report("chaos")
    with _folder(given.output) as folder:
        settings = _settings(given, folder)
        if given.controller:
            left = kill_controllers(report, given.controller, given.seed, folder, settings)
            report.finish(given.json)
            return int(left > 0)
        if given.hosts:
            return _on_hosts(given, folder, settings)
        peace = judge(_on_this_machine(folder / "peace", settings, [], given.step_bound))
        plan = schedule(given.seed, given.faults or (16 if given.quick else 66), given.kinds)
        chaos = judge(_on_this_machine(folder / "chaos", settings, plan, given.step_bound))
        write_outcomes(chaos, folder / "faults.jsonl")
        print_tables(report, peace, chaos)
        fill_report(report, peace, chaos)
    report.finish(given.json)
    return 0 if holds(report) else 1


def _on_hosts(given: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> int:
    try:
        report = hosts_struck(given, folder, settings)
    except NotPermitted as error:
        print(error, file=sys.stderr)
        return 2
    report.finish(given.json)
    return 0 if holds(report) else 1


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of runs and faults")
    parser.add_argument("--faults", type=int, metavar="N", help="on actors: 66, --quick 16")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help="of actors to strike",
    )
    parser.add_argument("--hosts", action="store_true", help="on two hosts, which die too")
    parser.add_argument("--host-faults", type=int, metavar="N", help="6, or 3 with --quick")
    parser.add_argument("--steps", type=int, metavar="N", help="70, or 24 with --quick")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument("--controller", type=int, default=0, metavar="N", help="runs to behead")
    parser.add_argument(
        "--step-bound", type=float, default=90.0, metavar="S", help="a longer wait is a hang"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the run's config"
    )
    return parser.parse_args()


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        yield output.resolve()
        return
    with TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


def _settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = SETTINGS | (QUICK if given.quick else FULL)
    settings |= {"run.seed": given.seed, "policy.cache_dir": folder / "policies"}
    if given.steps:
        settings["run.steps"] = given.steps
    return settings | dict(one.split("=", 1) for one in given.set)


def _on_this_machine(
    root: Path, settings: dict[str, Any], plan: Sequence[Planned], bound_s: float
) -> Ended:
    with TemporaryDirectory(prefix="cm-") as hook, launched(root, settings, Path(hook)) as run:
        injector = Injector(run, plan, int(settings["run.steps"]), Path(hook))
        return run_through(run, injector, bound_s)


def kill_controllers(
    report: Report, count: int, seed: int, folder: Path, settings: dict[str, Any]
) -> int:
    """Kill the controllers of `count` runs; return the total number of processes left over."""
    rng = random.Random(seed)
    rows, gone, left_over = [], [], 0
    for number in range(count):
        moment = rng.random() * SPAN_S
        with launched(folder / f"controller-{number}", settings) as run:
            if number % 2 == 0:  # the first run finishes its warm start for the others
                _until_first_step(run)
            time.sleep(moment)
            run.poll()
            before, doing = len(run.processes()), _doing(run)
            run.process.send_signal(signal.SIGKILL)
            took, left = _wait_gone(run)
        gone.append(took)
        left_over += left
        rows.append([doing, str(before), f"{took:.2f}", str(left)])
        print(f"killed {doing}: {left} of {before} left after {took:.2f} s", flush=True)
    columns = ("it was", "processes", "gone s", "left after 10 s")
    report.print_table(f"SIGKILL of the controller, {count} runs", columns, rows)
    report.figures["gone_p50_s"] = percentile(gone, 0.5)
    report.figures["gone_max_s"] = max(gone)
    report.ratios["processes_left"] = left_over
    return left_over


def _until_first_step(run: LiveRun) -> None:
    end = time.monotonic() + FIRST_STEP_BOUND_S
    while not run.metrics and not run.ended and time.monotonic() < end:
        time.sleep(POLL_S)
        run.poll()
    if not run.metrics:
        raise RuntimeError(f"the run did not come to its first step: {run.stderr[-500:]}")


def _doing(run: LiveRun) -> str:
    if run.metrics:
        return f"at step {len(run.metrics)}"
    return f"after {run.events[-1]['event']}" if run.events else "while it started"


def _wait_gone(run: LiveRun) -> tuple[float, int]:
    """Return the seconds until all processes are gone, at most the grace, and the rest's count."""
    began = time.monotonic()
    while (left := len(run.processes())) and time.monotonic() - began < GRACE_S:
        time.sleep(POLL_S)
    return time.monotonic() - began, left


if __name__ == "__main__":
    sys.exit(main())
