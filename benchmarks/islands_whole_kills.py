"""Whole islands, killed by SIGKILL in each phase of a round, and started again or replaced.

    python benchmarks/islands_whole_kills.py [--quick] [--kills N] [--seed N] [--keep DIR]

Two islands of the quickstart with a tiny model meet in a folder. All processes of one are killed at
once: controller, trainer, generator, environment and replay. Every second one comes back with an
empty run directory, as on another machine. Every average is computed once more by other code
(benchmarks/islands_audit.py), and the checkpoints of the end are compared with it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from islands_audit import TOLERANCE, Audit, Outcome, audit
from islands_moments import GROUP, PHASES, Watched, wait_for_moment
from report import Report, arguments
from safetensors.numpy import load_file

from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.services.directory.report import read_metrics
from composer_mesh.services.directory.status import read_status
from composer_mesh.services.launch.by_ssh import lives, pid_of
from composer_mesh.services.launch.handle import read_handle

PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
HANG_S = 600.0
COUNT = 2
SETTINGS = {
    "run.steps": 100_000,
    "policy.hidden_size": 32,
    "policy.intermediate_size": 64,
    "policy.layers": 1,
    "policy.heads": 2,
    "policy.kv_heads": 1,
    "policy.head_dim": 16,
    "policy.warm_start.steps": 20,
    "policy.warm_start.demonstrations": 200,
    "schedule.prompts_per_step": 2,
    "schedule.group_size": 4,
    "eval.episodes": 2,
    "replay.actors": 1,
    "trainer.lr_schedule": "constant",
    "trainer.checkpoint_every": 1,
    "islands.steps_per_round": 2,
    "islands.deadline_s": 20.0,
    "islands.absent_after": 1_000_000,
    "islands.rounds_kept": 1_000_000,
    "islands.outer.lr": 1.0,
    "islands.outer.momentum": 0.0,
}
"""Plain averages, of which nothing is removed, so that all are computed once more. Whoever is left
waits for the other in each round, and closes it alone after the deadline."""


@dataclass
class PairOutcome(Outcome):
    """What became of both islands."""

    phases: Counter[str] = field(default_factory=Counter)
    """Kills by the phase in which they found the island."""
    replaced: int = 0
    alone: int = 0
    """Rounds that one island closed by itself."""
    steps: int = 0
    rejoins_s: list[float] = field(default_factory=list)
    """Seconds from a start to the first new round of the island."""


class Pair:
    """Two islands as a user starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.store = folder, folder / "all", folder / "store"
        self.former: list[Path] = []

    def run(self, rank: int) -> Path:
        return self.root / f"island-{rank}"

    def watched(self, rank: int) -> Watched:
        return Watched(self.store, self.run(rank), rank)

    def start(self, *options: str) -> None:
        values = SETTINGS | {"policy.cache_dir": self.folder / "cache"}
        words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        where = ["--store", f"file://{self.store}", "--output", str(self.root), "--detach"]
        self._command("islands", str(PRESET), *words, "-n", str(COUNT), *where, *options)

    def kill(self, rank: int) -> None:
        """End every process of an island at once."""
        handle = read_handle(self.run(rank))
        assert handle is not None, f"island {rank} was not launched"
        os.killpg(pid_of(handle.job), signal.SIGKILL)
        while lives(handle.job):
            time.sleep(0.01)

    def replace(self, rank: int) -> None:
        """Move the run directory of a dead island away."""
        former = self.folder / f"former-{len(self.former)}"
        self.run(rank).rename(former)
        self.former.append(former)

    def stop(self, rank: int, outcome: PairOutcome) -> None:
        """Let an island write a checkpoint and end; a hang if it does not."""
        self._command("stop", str(self.run(rank)))
        until = time.monotonic() + HANG_S
        while self.lives(rank) and time.monotonic() < until:
            time.sleep(0.1)
        if self.lives(rank):
            outcome.hangs += 1
            self.kill(rank)

    def lives(self, rank: int) -> bool:
        handle = read_handle(self.run(rank))
        return handle is not None and lives(handle.job)

    def _command(self, *words: str) -> None:
        command = [sys.executable, "-m", "composer_mesh", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{words[0]} failed: {done.stderr[-2000:]}")


def killed_pair(folder: Path, kills: int, seed: int) -> PairOutcome:
    """Kill islands at random moments, each phase as often; judge what is left."""
    drawn, outcome, pair = random.Random(seed), PairOutcome(), Pair(folder)
    pair.start()
    for rank in range(COUNT):
        _await_round(pair, rank, 0, outcome)
    for number in range(kills):
        phase = PHASES[number % len(PHASES)]
        _kill_one(pair, drawn.randrange(COUNT), phase, number % 2 == 1, drawn, outcome)
        if outcome.hangs:
            break
    for rank in range(COUNT):
        if pair.lives(rank):
            pair.stop(rank, outcome)
        else:
            outcome.wrong.append(f"island {rank} has ended by itself: {_last_words(pair, rank)}")
    _judge(pair, outcome)
    return outcome


def _kill_one(
    pair: Pair, rank: int, phase: str, replace: bool, drawn: random.Random, outcome: PairOutcome
) -> None:
    victim = pair.watched(rank)
    found = wait_for_moment(phase, victim, drawn)
    pair.kill(rank)
    outcome.kills += 1
    outcome.phases[found] += 1
    newest = victim.newest
    if replace:
        pair.replace(rank)
        outcome.replaced += 1
    began = time.monotonic()
    pair.start("--only", str(rank), *([] if replace else ["--resume"]))
    _await_round(pair, rank, newest, outcome)
    outcome.rejoins_s.append(time.monotonic() - began)
    if replace:
        _check_start(pair, rank, newest, outcome)
    print(
        f"kill {outcome.kills}: island {rank} in {found} (meant: {phase}), round "
        f"{newest}, {'replaced' if replace else 'resumed'} in {outcome.rejoins_s[-1]:.0f} s",
        flush=True,
    )


def _await_round(pair: Pair, rank: int, after: int, outcome: PairOutcome) -> None:
    """Wait until an island has merged a round after one; it hangs if it does not."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        steps = read_metrics(pair.run(rank) / "metrics.jsonl")
        if steps and steps[-1]["islands/round"] > after:
            return
        if not pair.lives(rank):
            break
        time.sleep(0.05)
    outcome.hangs += 1
    print(f"island {rank} merges nothing after round {after}: {_last_words(pair, rank)}")


def _check_start(pair: Pair, rank: int, newest: int, outcome: PairOutcome) -> None:
    """An island that was replaced has to start from common weights that are not older."""
    events = (pair.run(rank) / "events.jsonl").read_text()
    joined = re.search(r'"island_joined".*?common weights of round (\d+)', events)
    if joined is None or int(joined[1]) < newest:
        told = "no event" if joined is None else f"round {joined[1]}"
        outcome.wrong.append(f"island {rank} was replaced after round {newest}, but has {told}")


def _judge(pair: Pair, outcome: PairOutcome) -> None:
    found = audit(open_store(f"file://{pair.store}"), GROUP)
    outcome.rounds, outcome.wrong = found.rounds, [*outcome.wrong, *found.wrong]
    outcome.alone = sum(len(islands) < COUNT for islands in found.islands.values())
    for run in [*map(pair.run, range(COUNT)), *pair.former]:
        steps = read_metrics(run / "metrics.jsonl")
        outcome.steps += len(steps)
        outcome.lost += sum(int(step["islands/lost"]) for step in steps)
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            outcome.wrong.append(f"{run.name} lacks steps, or has some twice")
    for rank in range(COUNT):
        outcome.wrong += _other_weights(pair.run(rank), found)


def _other_weights(run: Path, found: Audit) -> list[str]:
    """Return which checkpoints after a merge have other weights than the audit, in any order."""
    merged = {
        step["step"]: int(step["islands/round"])
        for step in read_metrics(run / "metrics.jsonl")
        if step["islands/merged"]
    }
    wrong, compared = [], 0
    for step, number in merged.items():
        file = run / "checkpoints" / f"step-{step}" / "model.safetensors"
        if not file.exists():
            continue
        held = np.sort(np.concatenate([one.ravel() for one in load_file(file).values()]))
        apart = np.abs(held - np.sort(found.weights[number]))
        compared += 1
        if not apart.max() <= TOLERANCE:
            wrong.append(f"{run.name} is {apart.max():g} off after step {step}, round {number}")
    return wrong if compared else [f"{run.name} has no checkpoint of a merge to compare"]


def _last_words(pair: Pair, rank: int) -> str:
    status = read_status(pair.run(rank))
    handle = read_handle(pair.run(rank))
    log = "" if handle is None or handle.log is None else handle.log.read_text()[-500:]
    return f"{'no status' if status is None else status.state}; {json.dumps(log)}"


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, metavar="N", help="20; 2 with --quick")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the runs and the store there"
    )
    options = parser.parse_args()
    kills = options.kills or (2 if options.quick else 20)
    report = Report("islands_whole_kills")
    with TemporaryDirectory(prefix="islands-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = killed_pair(folder, kills, options.seed)
    for text in found.wrong:
        print(text)
    report.figures |= {
        "kills": found.kills,
        **{f"kills_{phase}": found.phases[phase] for phase in PHASES},
        "replaced": found.replaced,
        "rounds": found.rounds,
        "rounds_of_one_island": found.alone,
        "steps": found.steps,
        "rejoin_s_median": float(np.median(found.rejoins_s)) if found.rejoins_s else 0.0,
        "rejoin_s_longest": max(found.rejoins_s, default=0.0),
    }
    report.ratios |= {
        "wrong_averages": len(found.wrong),
        "rounds_lost": found.lost,
        "hangs": found.hangs,
    }
    rows = [(name, f"{value:g}") for name, value in (report.figures | report.ratios).items()]
    report.print_table("whole islands killed by SIGKILL", ("what", "number"), rows)
    report.finish(options.json)


if __name__ == "__main__":
    main()
