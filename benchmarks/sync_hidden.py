"""Share of the weight syncs that overlaps with longer steps in a real asynchronous run.

A short run of the real command with a model of 25 million random weights, rollouts and steps to
match, on an otherwise idle machine. Reads the run's own metrics; called by `async.py`.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from composer_mesh.services.directory.report import read_metrics

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


@dataclass(frozen=True)
class Hidden:
    """Medians of a run's steps, in seconds, and the hidden share of all syncs' time."""

    step_s: float
    sync_s: float
    exposed_s: float
    share: float


def measure(steps: int) -> Hidden:
    """Run and measure. The first step overlaps with no sync, and the last sync with no step."""
    with TemporaryDirectory(prefix="sync-hidden-") as folder:
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
    waited = [float(step["time/weight_sync_s"]) for step in found]
    took = [float(step["time/weight_sync_total_s"]) for step in found]
    seconds = [float(step["time/step_s"]) for step in found]
    return Hidden(_middle(seconds), _middle(took), _middle(waited), 1 - sum(waited) / sum(took))


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)
