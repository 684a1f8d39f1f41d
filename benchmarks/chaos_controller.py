"""SIGKILL of the controller at random moments, and which of its processes are left.

Counts every process that the command started, directly or indirectly.
"""

import random
import signal
import time
from pathlib import Path
from typing import Any

from chaos_outcomes import percentile
from chaos_run import LiveRun, launched
from report import Report

GRACE_S = 10.0
POLL_S = 0.02
SPAN_S = 30.0
"""Moments are random within this from the start of the command, or from the end of its first
step: one half each, because a busy machine starts slowly."""
FIRST_STEP_BOUND_S = 900.0


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
