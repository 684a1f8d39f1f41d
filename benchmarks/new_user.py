"""Seconds from an installed package to a trained and evaluated task of one's own.

    python benchmarks/new_user.py [--quick] [--json FILE]

In a fresh folder: a new task, an episode by its expert, its tests, `check`, its run of 20 steps and
an evaluation of what it has learned, each by the command that its README names. Also `make
new-user`. `--quick` trains 2 steps of a shorter warm start, so that its ratio says little.
"""

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from report import Report, arguments

BAR_S = 180.0
"""Seconds that a new user may wait in all, on two quiet cores."""
NAME = "my_first_task"
COMMAND = [sys.executable, "-m", "composer_mesh"]
QUICK = ["--set", "run.steps=2", "--set", "policy.warm_start.steps=40"]


@dataclass(frozen=True)
class Part:
    """One command: wall seconds, and CPU seconds of it and of all its processes."""

    name: str
    wall_s: float
    cpu_s: float


def main() -> int:
    """Do what a new user does; return 1 where a command fails or all take longer than the bar."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    folder = Path(mkdtemp(prefix="new-user-"))
    try:
        parts = measured(folder, QUICK if given.quick else [])
    except subprocess.CalledProcessError as failed:
        sys.stderr.write(f"{' '.join(failed.cmd)} ended with status {failed.returncode}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = filled(parts)
    report.finish(given.json)
    return int(report.ratios["seconds_over_bar"] > 1.0)


def measured(folder: Path, overrides: Sequence[str]) -> list[Part]:
    """Run each command of the project's README; return what each took."""
    project = folder / NAME
    evaluate = [*COMMAND, "eval", f"runs/{NAME}", "--set", "eval.episodes=30"]
    return [
        part("new-task", [*COMMAND, "new-task", NAME], folder),
        part("play", [*COMMAND, "play", "config.toml", "--scripted", "expert"], project),
        part("its tests", [sys.executable, "-m", "unittest", "tests/test_task.py"], project),
        part("check", [*COMMAND, "check", "config.toml", *overrides], project),
        part("train", [*COMMAND, "train", "config.toml", *overrides], project),
        part("eval", evaluate, project),
    ]


def part(name: str, command: Sequence[str], folder: Path) -> Part:
    """Run one command; its output is shown."""
    print(f"--- {name}", flush=True)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Part(name, time.monotonic() - began, cpu_s)


def filled(parts: Sequence[Part]) -> Report:
    """Print the table; return the report with all figures and the ratio."""
    report = Report("new_user")
    whole = Part("all", sum(one.wall_s for one in parts), sum(one.cpu_s for one in parts))
    for one in (*parts, whole):
        key = one.name.replace(" ", "_").replace("-", "_")
        report.figures |= {f"{key}_s": one.wall_s, f"{key}_cpu_s": one.cpu_s}
    rows = [[one.name, f"{one.wall_s:.1f} s", f"{one.cpu_s:.1f} s"] for one in (*parts, whole)]
    report.print_table("a new user's first task", ["command", "time", "CPU time"], rows)
    report.ratios = {"seconds_over_bar": whole.wall_s / BAR_S}
    return report


if __name__ == "__main__":
    sys.exit(main())
