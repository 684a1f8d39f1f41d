"""Islands: what they send, how long they wait, what faults do to them, and what they learn.

    python benchmarks/islands.py [--quick] [--runs] [--islands N] [--json FILE]

`worlds` are three islands in threads over a store that fails as clouds do. Each is drawn by its
seed: which operations are refused, lose their answer or are torn, which listings are late, at which
operation an island is killed, who is ten times slower, whose clock runs how fast, and whose weights
become NaN. Their time runs 20 times faster than on the wall. `kills` are processes over a folder
and over an S3 server, killed by SIGKILL. Every average is computed once more by other code
(`wrong_averages`). With --runs the quickstart is trained by one
run, and by N islands that have as many rollouts together; `communicated_bytes_over_ddp` is what an
island sends and receives in a step, over that of a rank in a ring all-reduce of float32 gradients.
"""

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from islands_audit import TOLERANCE, Audit, Outcome, audit
from islands_kills import KillOutcome, killed_islands
from islands_s3 import BUCKET, s3_program, s3_server
from islands_stores import Faults, FaultyStore, KilledError, MemoryStore
from islands_world import Run, island_config
from report import Report, arguments

from composer_mesh.plugins.islands.rounds.all_reduce import Clock
from composer_mesh.plugins.islands.store.blobs import decided
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.services.directory.report import read_metrics

PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
WORLDS, QUICK_WORLDS = 40, 8
THREE, STEPS, FASTER, HANG_S = 3, 16, 20, 60.0
"""Islands of a world, their steps, how much faster their time runs, and when they hang."""
KILLS, QUICK_KILLS = 20, 3
STEPS_PER_ROUND = 6
ISLANDS_LR = 8e-4
"""More than the preset's 3e-4: an island takes a quarter of the steps, and four are averaged."""
OUTER = {"islands.outer.lr": 1.0, "islands.outer.momentum": 0.0}
"""Plain averages: DiLoCo's momentum needs more rounds than the three of this short run."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--runs", action="store_true", help="train the quickstart too: minutes")
    parser.add_argument("--islands", type=int, default=4, metavar="N", help="in --runs; 4")
    parser.add_argument("--s3", action="store_true", help="let the runs meet in the S3 server")
    parser.add_argument("--overlap", type=int, default=1, metavar="STEPS", help="in --runs; 1")
    options = parser.parse_args()
    report = Report("islands")
    with TemporaryDirectory(prefix="islands-") as folder:
        worlds(report, QUICK_WORLDS if options.quick else WORLDS)
        kills(report, Path(folder), QUICK_KILLS if options.quick else KILLS)
        if options.runs:
            runs(report, Path(folder), options.islands, options.s3, options.overlap)
    report.finish(options.json)


def worlds(report: Report, count: int) -> None:
    """Live worlds with faults of the store, kills, slow islands, wrong clocks and NaN."""
    found = [faulty_world(seed) for seed in range(count)]
    happened, new_events = Counter[str](), Counter[str]()
    for one in found:
        happened += one.happened
        new_events += one.new_events
        for text in one.wrong:
            print(f"world {one.seed}: {text}")
    total = {
        "worlds": len(found),
        "worlds_kills": sum(one.kills for one in found),
        "worlds_rounds": sum(one.rounds for one in found),
        "worlds_rounds_lost": sum(one.lost for one in found),
        "worlds_hangs": sum(one.hangs for one in found),
        **{f"worlds_{name}": number for name, number in sorted((happened + new_events).items())},
    }
    report.figures |= total
    report.ratios["wrong_averages"] = sum(len(one.wrong) for one in found)
    report.ratios["hangs"] = total["worlds_hangs"]
    report.ratios["rounds_lost"] = total["worlds_rounds_lost"]
    rows = [(name.removeprefix("worlds_"), str(number)) for name, number in total.items()]
    report.print_table("three islands over a failing store", ("what", "number"), rows)


@dataclass
class World(Outcome):
    """What became of a world."""

    seed: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    new_events: Counter[str] = field(default_factory=Counter)


def faulty_world(seed: int) -> World:
    """Live one world; return what became of it, with every average computed again."""
    drawn, outcome, store = random.Random(seed), World(seed=seed), MemoryStore()
    slow, nan = drawn.randrange(THREE), drawn.randrange(2 * THREE)
    islands = [_Island(rank, seed, store, rank == slow, rank == nan) for rank in range(THREE)]
    threads = [threading.Thread(target=one.live, daemon=True) for one in islands]
    for thread in threads:
        thread.start()
    until = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    outcome.hangs = sum(thread.is_alive() for thread in threads)
    found = audit(store, "fragment-0000")
    outcome.rounds, outcome.wrong = found.rounds, found.wrong
    for one in islands:
        one.add_to(outcome, found)
    return outcome


class _Island:
    """One island's process, which may be killed and is then started again."""

    def __init__(self, rank: int, seed: int, store: MemoryStore, slow: bool, nan: bool) -> None:
        self._drawn = random.Random(1000 * seed + rank)
        self._store, self._slow, self._nan = store, slow, nan
        self._faults = Faults(
            refused=0.05, lost_answer=0.05, torn=0.03, torn_silently=0.01, stale_listing=0.2
        )
        self._rank, self._kills, self._errors = rank, 0, list[str]()
        self._merged: list[tuple[int, np.ndarray]] = []
        config = island_config(
            rank, THREE, steps_per_round=2, deadline_s=10.0, request_s=5.0, rounds_kept=10**6
        )
        rate, start = self._drawn.choice((0.2, 1.0, 5.0)), self._drawn.uniform(-1e9, 1e9)
        clock = Clock(
            lambda: start + rate * FASTER * time.monotonic(),
            lambda seconds: time.sleep(seconds / FASTER),
        )
        self._run = Run(rank, config, store, STEPS, clock=clock)

    def live(self) -> None:
        """Train to the end, however often the process is killed or refused."""
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            try:
                self._start()
                return
            except KilledError:
                self._kills += 1
            except Exception as error:  # noqa: BLE001  a process that fails is started again
                self._errors.append(f"{type(error).__name__}: {error}")

    def _start(self) -> None:
        seed = self._drawn.randrange(10**9)
        mortal = self._drawn.random() < 0.5 and self._kills < 3
        operations = self._drawn.randrange(20, 200) if mortal else math.inf
        self._run.store = FaultyStore(self._store, self._faults, seed, operations)
        self._run.open()
        while self._run.step < STEPS:
            time.sleep((0.1 if self._slow else 0.01) * 10 / FASTER)
            if self._nan and self._run.step == 5:
                self._run.weights.of["a"][0] = np.nan
            self._run.train()
            figures = self._run.figures[-1]
            if figures["islands/merged"]:
                self._merged.append((int(figures["islands/round"]), self._run.flat))
        assert self._run.island is not None
        self._run.island.finish()

    def add_to(self, outcome: World, found: Audit) -> None:
        """Add what happened here, and compare what was merged with the audit."""
        outcome.kills += self._kills
        outcome.lost += sum(int(one["islands/lost"]) for one in self._run.figures)
        outcome.new_events.update(kind for kind, _ in self._run.new_events)
        outcome.new_events.update(text[:60] for text in self._errors)
        outcome.happened += self._faults.happened
        for number, weights in self._merged:
            expected = found.weights.get(number)
            apart = np.inf if expected is None else float(np.abs(weights - expected).max())
            if not apart <= TOLERANCE:
                outcome.wrong.append(f"island {self._rank} is {apart:g} off after round {number}")


def kills(report: Report, folder: Path, count: int) -> None:
    """Kill processes over a folder, and over an S3 server where one is installed."""
    found = {"file": killed_islands(f"file://{folder}/store", folder / "file", kills=count, seed=1)}
    program = s3_program()
    if program is None:
        print("no S3 server is installed, so none was used: nox -s islands --install-only")
    else:
        with s3_server(program, folder / "s3.log") as environment:
            os.environ |= environment
            found["s3"] = killed_islands(f"s3://{BUCKET}/kills", folder / "s3", kills=count, seed=2)
    for name, one in found.items():
        for text in one.wrong:
            print(f"{name}: {text}")
        report.figures |= {f"{name}_kills": one.kills, f"{name}_rounds": one.rounds}
        report.ratios["wrong_averages"] += len(one.wrong) + one.steps_missing
        report.ratios["hangs"] += one.hangs
        report.ratios["rounds_lost"] += one.lost
    report.print_table(
        "processes killed by SIGKILL",
        ("store", "kills", "rounds", "lost", "hangs", "wrong"),
        [(name, *_numbers(one)) for name, one in found.items()],
    )


def _numbers(one: KillOutcome) -> tuple[str, ...]:
    numbers = (one.kills, one.rounds, one.lost, one.hangs, len(one.wrong) + one.steps_missing)
    return tuple(map(str, numbers))


def runs(report: Report, folder: Path, count: int, by_s3: bool, overlap: int) -> None:
    """Train the quickstart in one run, and in islands with as many rollouts together."""
    steps = 72 // count
    alone = folder / "alone"
    _run(
        folder, "train", str(PRESET), "--set", f"run.steps={72 // count * count}", "--output", alone
    )
    program = s3_program() if by_s3 else None
    with ExitStack() as servers:
        if program is not None:
            os.environ |= servers.enter_context(s3_server(program, folder / "runs.log"))
        uri = f"s3://{BUCKET}/runs" if by_s3 else f"file://{folder}/meet"
        settings = {
            "run.steps": steps,
            "trainer.lr": ISLANDS_LR,
            "islands.steps_per_round": STEPS_PER_ROUND,
            "islands.quantization": "int8",
            "islands.overlap_steps": overlap,
            **OUTER,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        all_of = folder / "islands"
        _run(
            folder,
            "islands",
            str(PRESET),
            *words,
            "-n",
            str(count),
            "--store",
            uri,
            "--output",
            all_of,
        )
        _compare(report, alone, all_of, uri, count)


def _run(folder: Path, *words: str | Path) -> None:
    log = folder / "run.log"
    command = [sys.executable, "-m", "composer_mesh", *map(str, words)]
    with log.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]} failed:\n{log.read_text()[-3000:]}")


def _compare(report: Report, alone: Path, all_of: Path, uri: str, count: int) -> None:
    one = json.loads((alone / "summary.json").read_text())
    many = json.loads((all_of / "summary.json").read_text())
    layout = decided(open_store(uri), "fragment-0000/states/00000000/outer") or {}
    parameters = int(layout["about"]["size"])
    bytes_of = [_bytes_after_start(all_of / f"island-{rank}") for rank in range(count)]
    ring = 2 * 2 * (count - 1) / count * 4 * parameters
    per_step = sum(bytes_of) / count / (many["each"][0]["steps"] - 1)
    report.figures |= {
        "islands": count,
        "store": uri.partition(":")[0],
        "parameters": parameters,
        "steps_per_round": STEPS_PER_ROUND,
        "islands_lr": ISLANDS_LR,
        "rounds": many["round"],
        "runs_rounds_lost": many["lost"],
        "success_alone": one["eval"]["final"]["success"],
        "success_islands": many["eval"]["final"]["success"],
        "success_before": one["eval"]["initial"]["success"],
        "rollouts_alone": one["rollouts"],
        "rollouts_islands": many["rollouts"],
        "wall_s_alone": one["wall_s"],
        "wall_s_islands": many["wall_s"],
        "bytes_start": many["bytes_sent"] + many["bytes_received"] - sum(bytes_of),
    }
    report.ratios |= {
        "communicated_bytes_over_ddp": per_step / ring,
        "bytes_over_ddp_times_steps_per_round": per_step / ring * STEPS_PER_ROUND,
        "time_communicating": many["time_communicating"],
        **_waits([all_of / f"island-{rank}" for rank in range(count)]),
        "success_islands_minus_alone": many["eval"]["final"]["success"]
        - one["eval"]["final"]["success"],
    }
    rows = [(name, str(value)) for name, value in report.figures.items() if "worlds" not in name]
    report.print_table("the quickstart", ("what", "number"), rows)


def _waits(runs: Sequence[Path]) -> dict[str, float]:
    """Return the parts of `time_communicating`: the first round, the last one, and the others.

    Islands begin at different times, for which the first round waits; the last is of all steps, so
    that there is none left to train while it is under way.
    """
    steps = [read_metrics(run / "metrics.jsonl") for run in runs]
    trained = sum(one["time/step_s"] for run in steps for one in run)
    parts = dict.fromkeys(("first", "other", "last"), 0.0)
    for run in steps:
        for one in run:
            first = one["islands/round"] <= 1
            part = "last" if one is run[-1] else "first" if first else "other"
            parts[part] += one.get("time/islands_s") or 0.0
    return {f"time_waiting_{part}": waited / trained for part, waited in parts.items()}


def _bytes_after_start(run: Path) -> int:
    """Return the bytes of the rounds: what an island sends and reads at its start is apart."""
    steps: list[dict[str, Any]] = read_metrics(run / "metrics.jsonl")[1:]
    return int(sum(one["islands/bytes_sent"] + one["islands/bytes_received"] for one in steps))


if __name__ == "__main__":
    main()
