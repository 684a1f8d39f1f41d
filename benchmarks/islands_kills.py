"""Islands as processes over a real store, killed by SIGKILL at random moments and started again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from islands_audit import TOLERANCE, Outcome, audit

from composer_mesh.plugins.islands.store.opening import open_store

WORKER = Path(__file__).parent / "islands_worker.py"
HANG_S = 240.0
STEPS_PER_ROUND = 2


@dataclass
class KillOutcome(Outcome):
    """What became of islands that were killed."""

    absences: int = 0
    """Islands that miss a round which undisturbed ones would have, summed over these rounds."""
    steps_missing: int = 0


class WorkerProcess:
    """One island's process and what it has printed over all its lives."""

    def __init__(self, store: str, rank: int, count: int, folder: Path, steps: int) -> None:
        config = {
            "steps_per_round": STEPS_PER_ROUND,
            "deadline_s": 2.0,
            "request_s": 5.0,
            "rounds_kept": 10**6,
        }
        self._command = [
            *(sys.executable, str(WORKER), store, str(rank), str(count), str(folder)),
            *("--steps", str(steps), "--step-s", "0.05", "--config", json.dumps(config)),
        ]
        self.rank, self.steps = rank, steps
        self._out = folder / f"{rank}.jsonl"
        self._errors = folder / f"{rank}.err"
        self.start()

    def start(self) -> None:
        """Start the process, which continues from its checkpoint."""
        with self._out.open("ab") as out, self._errors.open("ab") as errors:
            out.write(b"\n")  # after a line that a kill has cut
            out.flush()
            self.process = subprocess.Popen(self._command, stdout=out, stderr=errors)

    def lines(self) -> list[dict]:
        """Return what the process has printed, without a line that a kill has cut."""
        found = []
        for line in self._out.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    @property
    def errors(self) -> str:
        """What the process has said on stderr."""
        return self._errors.read_text()


def killed_islands(
    store: str, folder: Path, *, kills: int, seed: int, count: int = 2, steps: int = 240
) -> KillOutcome:
    """Kill islands at random moments; return what became of them after the last has ended."""
    drawn, outcome = random.Random(seed), KillOutcome()
    folder.mkdir(parents=True, exist_ok=True)
    workers = [WorkerProcess(store, rank, count, folder, steps) for rank in range(count)]
    until = time.monotonic() + HANG_S
    while any(one.process.poll() is None for one in workers) and time.monotonic() < until:
        time.sleep(drawn.uniform(0.05, 1.5))
        living = [one for one in workers if one.process.poll() is None]
        if living and outcome.kills < kills:
            victim = drawn.choice(living)
            victim.process.kill()
            victim.process.wait()
            outcome.kills += 1
            victim.start()
    for one in workers:
        if one.process.poll() is None:
            outcome.hangs += 1
            one.process.kill()
            one.process.wait()
        elif one.process.returncode:
            outcome.wrong.append(f"island {one.rank} failed: {one.errors[-300:]}")
    _judge(store, workers, outcome)
    return outcome


def _judge(store: str, workers: list[WorkerProcess], outcome: KillOutcome) -> None:
    found = audit(open_store(store), "fragment-0000")
    outcome.rounds, outcome.wrong = found.rounds, [*outcome.wrong, *found.wrong]
    for one in workers:
        undisturbed = range(1, one.steps // STEPS_PER_ROUND + 1)
        outcome.absences += sum(one.rank not in found.islands.get(n, ()) for n in undisturbed)
        lines = one.lines()
        steps = {line["step"]: line for line in lines}  # of one trained again the last
        outcome.lost += sum(int(line["figures"]["islands/lost"]) for line in steps.values())
        outcome.steps_missing += len(set(range(1, one.steps + 1)) - steps.keys())
        for line in lines:
            number = int(line["figures"]["islands/round"])
            if not line["figures"]["islands/merged"]:
                continue
            weights = found.weights.get(number, np.inf)
            if not np.abs(np.array(line["weights"]) - weights).max() <= TOLERANCE:
                outcome.wrong.append(f"island {one.rank} has other weights after round {number}")
