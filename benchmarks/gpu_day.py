"""What one GPU does for a run, compared with its limits and with others: one script, nine minutes.

    python benchmarks/gpu_day.py [--dry] [--part NAME ...] [--json FILE] [--budget SECONDS]

Needs torch 2.11 or newer with transformers and pydantic, and a GPU, or `--dry`, which runs the same
code with tiny sizes on a CPU. No network; parts for which a package is missing name it. Parts run
in the order of their value, each in a process of its own with a time limit, and those for which no
time remains are skipped. What is found is written after every part, by default to docs/gpu/ with
the day and the card in its name; results of earlier visits of that day are kept. A row may have a
bar: where it is not met, the kernels that took the time are stored with it. The exit status is 1
where a part fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_parts
import torch
from gpu_colocate import PARTS as COLOCATE
from gpu_limits import Limits, nominal
from gpu_losses import PARTS as LOSSES
from gpu_parts import DRY, PARTS, REAL, Bench, Row
from gpu_runs import PARTS as RUNS
from gpu_step import PARTS as STEPS
from report import Report, commit, write_whole

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "gpu"
OLDEST = (2, 11)
BUDGET_S, LEAST_S, END_S = 540.0, 15.0, 5.0
"""Seconds of a visit, those without which no part starts, and those that a part has to end."""
LIMITS = "limits"
DRY_TIMES = 4
"""How much longer a part may take on a CPU, which others may use too."""
ALL: dict[str, Callable[[Bench], Iterable[Row]]] = {
    **LOSSES,
    **STEPS,
    **PARTS,
    **COLOCATE,
    **RUNS,
}
"""Parts in the order in which they run, after the limits that all are compared with."""
LONGER_S = {"losses": 150.0, "step": 180.0, "tree": 100.0, "memory": 100.0, "run": 200.0}
"""Seconds of parts that need more than others."""
LINES = 12
"""Last lines of a failed part that are stored."""

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are written")
    parser.add_argument("--part", action="append", choices=ALL, metavar="NAME", help="these only")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all (default: 540)"
    )
    given = parser.parse_args()
    if refusal := unusable(given.dry):
        print(refusal, file=sys.stderr)
        return 2
    file = given.json or (None if given.dry else RESULTS / f"{_day()}-{_slug()}.json")
    day = Day(file, given.dry, given.budget)
    day.measure([LIMITS, *(given.part or ALL)])
    failed = [name for name, one in day.parts.items() if one["status"] in FAILED]
    for name, one in day.parts.items():
        if one["status"] != DONE:
            print(f"{name}: {one['status']}: {one['why'].splitlines()[-1]}")
    return 1 if failed else 0


DONE, LEFT_OUT, SKIPPED, FAILED = "done", "left out", "skipped", ("failed", "out of time")


def unusable(dry: bool) -> str:
    """Return why nothing can be measured here; empty if it can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        return f"torch is {torch.__version__}, but 2.11 is the oldest that is measured: upgrade it"
    if not dry and not torch.cuda.is_available():
        return "torch finds no CUDA device: run this on a machine with a GPU, or with --dry"
    return ""


class Day:
    """The results of a day."""

    def __init__(self, file: Path | None, dry: bool, budget: float) -> None:
        self._file, self._dry, self._ends = file, dry, time.monotonic() + budget
        self._machine = machine(dry)
        self.parts: dict[str, Found] = _earlier(file, self._machine) if file else {}
        self._limits: dict[str, float] = {}

    def measure(self, names: Sequence[str]) -> None:
        """Measure parts one after the other, and write the file after each."""
        for name in names:
            remaining = self._ends - time.monotonic()
            if remaining < LEAST_S:
                self._add(name, _outcome(SKIPPED, f"{remaining:.0f} s remain of the budget"))
                continue
            self._add(name, self._measured(name, remaining))
            if name == LIMITS and not self._limits:
                return

    def _measured(self, name: str, remaining: float) -> Found:
        longest = LONGER_S.get(name, gpu_parts.LIMIT_S) * (DRY_TIMES if self._dry else 1)
        limit = min(longest, remaining)
        began = time.monotonic()
        order = {"part": name, "dry": self._dry, "limits": self._limits}
        found = in_a_process(order, limit)
        if name == LIMITS:
            self._limits = found.pop("limits", {})
        return found | {"seconds": round(time.monotonic() - began, 1)}

    def _add(self, name: str, found: Found) -> None:
        """Print what a part found, and write all that is known; earlier results give way to new."""
        print_part(name, found)
        if found["status"] != SKIPPED or name not in self.parts:
            self.parts[name] = found | {"commit": self._machine["commit"]}
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, self._content())

    def _content(self) -> Found:
        report = Report("gpu_day")
        for part in self.parts.values():
            for row in part.get("rows", ()):
                report.figures[f"{row['name']}, {row['unit']}"] = row["value"]
                report.ratios[row["name"]] = row["ratio"]
        return report.content() | self._machine | {"parts": self.parts}


def machine(dry: bool) -> Found:
    """Return the day, the card, and the versions of what computes on it."""
    name = nominal(torch.device("cpu" if dry else "cuda"))[0]
    return {
        "day": _day(),
        "card": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(dry),
        "python": sys.version.split()[0],
        "commit": commit(),
        "dry": dry,
    }


def _driver(dry: bool) -> str | None:
    if dry:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return f"unknown: {error}"
    return done.stdout.strip().partition("\n")[0] or f"unknown: {done.stderr.strip()}"


def _earlier(file: Path, now: Found) -> dict[str, Found]:
    """Return the parts of earlier visits; SystemExit where they are of another machine or day."""
    if not file.exists():
        return {}
    found: Found = json.loads(file.read_text(encoding="utf-8"))
    for key in ("day", "card", "torch", "dry"):
        if found.get(key) != now[key]:
            raise SystemExit(
                f"{file} is of {key} {found.get(key)} but this is {now[key]}: name another --json"
            )
    parts: dict[str, Found] = found["parts"]
    return parts


def _day() -> str:
    return datetime.now(UTC).date().isoformat()


def _slug() -> str:
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


PROCESSES = multiprocessing.get_context("forkserver")
"""Its server has loaded this file, and forks a process for each part."""


def in_a_process(order: Found, limit: float) -> Found:
    """Let a process of its own measure a part; return what it wrote, whatever became of it."""
    with tempfile.TemporaryDirectory() as folder:
        rows, output = Path(folder) / "rows.json", Path(folder) / "output"
        process = PROCESSES.Process(target=work, args=(order, str(rows), str(output)), daemon=True)
        process.start()
        process.join(limit)
        late = process.is_alive()
        with suppress(ProcessLookupError, PermissionError):  # all of it has ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(END_S)
        found = _outcome(DONE, "")
        if rows.exists():
            found |= json.loads(rows.read_text(encoding="utf-8"))
        if late:
            found |= _outcome(FAILED[1], f"it took longer than its {limit:.0f} s")
        elif not found.pop("ended", False):
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
            last = [*lines, f"the process ended with status {process.exitcode}"]
            found |= _outcome(FAILED[0], "\n".join(last))
        return {"rows": []} | found


def work(order: Found, rows: str, output: str) -> None:
    """Measure a part in this process, and write each of its rows once it is there."""
    os.setsid()  # it is ended with all that it starts
    printed = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(printed, stream)
    file = Path(rows)
    found: Found = _outcome(DONE, "") | {"rows": []}
    name, device = order["part"], torch.device("cpu" if order["dry"] else "cuda")
    size = DRY if order["dry"] else REAL
    try:
        if name == LIMITS:
            limits = Limits.measured(device, size.matmul_side, size.copied_bytes)
            found |= {"limits": asdict(limits), "rows": [one.as_json() for one in _sheet(limits)]}
        else:
            for row in ALL[name](Bench(device, size, Limits(**order["limits"]), "sdpa")):
                found["rows"].append(row.as_json(judged=not order["dry"]))
                write_whole(file, found)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("composer_mesh"):
            raise  # a module of ours that has moved is a defect of this script
        found |= _outcome(LEFT_OUT, f"{error.name} is not installed")
    except Exception:  # noqa: BLE001  each failure is reported, and the other parts are measured
        last = traceback.format_exc().splitlines()[-LINES:]
        found |= _outcome(FAILED[0], "\n".join(last))
    write_whole(file, found | {"ended": True})


def _outcome(status: str, why: str) -> Found:
    return {"status": status, "why": why}


def _sheet(limits: Limits) -> list[Row]:
    """Return the measured limits as parts of the maker's data sheet, where that is known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tflops, memory = nominal(device)[1] or (limits.matmul_tflops, limits.memory_gb_s)
    return [
        Row("matrix products", limits.matmul_tflops, "TFLOP/s", tflops),
        Row("copy in memory", limits.memory_gb_s, "GB/s", memory),
        Row("copy to the host", limits.to_host_gb_s, "GB/s", limits.to_host_gb_s),
        Row("copy to the device", limits.to_device_gb_s, "GB/s", limits.to_device_gb_s),
    ]


def print_part(name: str, found: Found) -> None:
    """Print the rows of a part, and how it ended."""
    table = [
        (
            row["name"],
            f"{row['value']:,.4g} {row['unit']}",
            f"{row['limit']:,.4g}",
            f"{row['ratio']:.3f}",
            bar_of(row),
        )
        for row in found.get("rows", ())
    ]
    title = f"{name}: {found['status']}, {found.get('seconds', 0)} s"
    Report.print_table(title, ("measured", "value", "limit", "ratio", "bar"), table)
    if found["why"]:
        print(found["why"])
    sys.stdout.flush()


def bar_of(row: Found) -> str:
    """Return a row's bar, and whether it is met, in words; empty without one."""
    if row["bar"] is None:
        return ""
    sign = "<=" if row["at_most"] else ">="
    met = {True: "met", False: "not met", None: "not judged"}[row["met"]]
    return f"{sign} {row['bar']:g}: {met}"


if __name__ == "__main__":
    status = main()
    if PROCESSES.active_children():  # one that hangs in its driver would be waited for
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
