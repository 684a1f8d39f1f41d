"""How long a run takes to start, and a killed generator to serve again, in imports of torch.

    python benchmarks/startup.py [--quick] [--json FILE]

A small quickstart with two generators, whose policy is made before, with and without the fork
server (`placement.fork_server`), alternating; before each, a fresh interpreter imports torch. A
start lasts from the command to the end of the first step, a restart from the generator's death to
the moment when its replacement has the current weights and serves.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from chaos_run import PRESET
from report import Report, arguments

WAYS = {"forked": "true", "by_themselves": "false"}
LONGEST_WAIT_S = 600.0
"""Longest wait for one event, on a machine with other load."""
VICTIM = "generator-0"
SETTINGS = {
    "run.steps": 1000,
    "policy.warm_start.steps": 20,
    "policy.warm_start.demonstrations": 200,
    "eval.episodes": 2,
    "generator.replicas": 2,
    "schedule.prompts_per_step": 2,
    "schedule.group_size": 4,
}


@dataclass
class Times:
    """Seconds that one variant took, a value per round."""

    start: list[float] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)


def main() -> int:
    """Measure each variant in turn; return 1 where a restart is not twice as fast as before."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    rounds, folder = 1 if given.quick else 5, Path(mkdtemp(prefix="startup-"))
    times, imports = {way: Times() for way in WAYS}, []
    try:
        one_run(folder / "warm-up", folder / "policies", "true", Times())
        for number in range(rounds):
            for way, forks in WAYS.items():
                imports.append(torch_import_s())
                one_run(folder / f"{way}-{number}", folder / "policies", forks, times[way])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = filled(times, statistics.median(imports))
    report.finish(given.json)
    return int(report.ratios["restart_over_restart_before"] > 0.5)


def filled(times: dict[str, Times], imported_s: float) -> Report:
    """Print the table; return the report with all figures and ratios."""
    report, rows = Report("startup"), []
    report.figures["torch_import_s"] = imported_s
    for way, found in times.items():
        start, restart = statistics.median(found.start), statistics.median(found.restart)
        report.figures |= {f"{way}_start_s": start, f"{way}_restart_s": restart}
        rows.append([way, f"{start:.2f} s", f"{restart:.2f} s"])
    report.print_table(
        f"medians; import torch takes {imported_s:.2f} s", ["processes", "start", "restart"], rows
    )
    figures = {name: float(value) for name, value in report.figures.items()}
    report.ratios = {
        "run_start_over_torch_import": figures["forked_start_s"] / imported_s,
        "restart_over_torch_import": figures["forked_restart_s"] / imported_s,
        "run_start_over_torch_import_before": figures["by_themselves_start_s"] / imported_s,
        "restart_over_torch_import_before": figures["by_themselves_restart_s"] / imported_s,
        "restart_over_restart_before": figures["forked_restart_s"]
        / figures["by_themselves_restart_s"],
    }
    return report


def torch_import_s() -> float:
    """Return how long a fresh interpreter takes to import torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def one_run(root: Path, policies: Path, forks: str, times: Times) -> None:
    """Start a run, kill a generator once steps are made, and end the run."""
    settings = SETTINGS | {"policy.cache_dir": policies, "placement.fork_server": forks}
    command = [sys.executable, "-m", "composer_mesh", "train", str(PRESET), "--output", str(root)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    began = time.time()
    with root.with_suffix(".log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait(run, root, lambda: bool(lines(root / "metrics.jsonl")))
        times.start.append(time.time() - began)
        victim = of_kind(root, "actor_started")
        assert victim is not None
        os.kill(int(victim["detail"].split()[1]), signal.SIGKILL)
        wait(run, root, lambda: of_kind(root, "actor_restarted") is not None)
        died, restarted = of_kind(root, "actor_died"), of_kind(root, "actor_restarted")
        assert died is not None
        assert restarted is not None
        times.restart.append(restarted["time"] - died["time"])
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(LONGEST_WAIT_S)


def wait(run: "subprocess.Popen[bytes]", root: Path, condition: Callable[[], bool]) -> None:
    """Wait for a condition while the run lives; raises `RuntimeError` with its output."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"the run did not get there:\n{root.with_suffix('.log').read_text()}"
            )
        time.sleep(0.05)


def of_kind(root: Path, kind: str) -> dict[str, Any] | None:
    """Return the victim's first event of a kind."""
    found = lines(root / "events.jsonl")
    return next((one for one in found if one["event"] == kind and VICTIM in one["actor"]), None)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects that a run is writing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    sys.exit(main())
