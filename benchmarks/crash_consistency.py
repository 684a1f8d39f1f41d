"""Kills and resumes a run repeatedly, and audits that nothing is lost.

    python benchmarks/crash_consistency.py [--quick] [--dynamic-sampling] [--json FILE]

A short run of the quickstart preset, whose rollouts run ahead and whose teachers cost money, is
killed with SIGKILL, every process at once: at random moments, inside a checkpoint, while a group's
file is written, and during a weight transfer. After each kill the run is resumed. Audits of the
store count prompts that no step trained (`prompts_skipped`), prompts that two steps trained
(`trained_twice`), finished groups that are gone or changed (`traces_lost`) and what steps took or
dropped against the rules of dynamic sampling (`steps_wrong`); the provider's ledger gives what was
paid for twice (`paid_twice_usd`), without answers in flight when the run was killed, which are
reported separately.
"""

import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tomli_w
from chaos_run import MARKER_ENV, PRESET, kill_marked, marked
from crash_audit import Audit
from crash_provider import COMPLETION_USD, PROMPT_USD, PaidPanel
from report import Report, arguments

from composer_mesh.actors.experts.http import ExpertServer
from composer_mesh.configs.load import load_config
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.toolbox import ToolboxTask

KEY_ENV, KEY = "CRASH_TEACHER_KEY", "sk-benchmark-0123456789abcdef"
TEACHERS = ("careful", "ordinary", "hasty")
PROMPTS = 2
LONGEST_WAIT_S = 600.0
"""Longest wait for one start to reach its moment, on a machine with other load."""

INSIDE = {
    "checkpoint": "checkpoints/.step-*",
    "store write": "traces/*/.*",
    "weight sync": "weights/*/*version-*",
}
"""Files that exist while an operation is in progress."""

Moment = Callable[["CrashedRun"], bool]


@dataclass
class CrashedRun:
    """A run directory, and the command that currently works on it."""

    root: Path
    config: Path
    process: "subprocess.Popen[bytes] | None" = None
    marker: str = ""
    began: float = 0.0
    starts: int = 0
    ready: int = 0
    """Starts that had loaded their policy before this one."""
    steps_before: int = 0
    kills: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        """Start the run, or resume it."""
        command = [sys.executable, "-m", "composer_mesh", "train", str(self.config)]
        command += ["--output", str(self.root), *(["--resume"] if self.starts else [])]
        self.marker, self.began = uuid.uuid4().hex, time.monotonic()
        self.ready, self.steps_before = self._ready(), self.steps()
        environment = os.environ | {MARKER_ENV: self.marker, "OMP_NUM_THREADS": "1", KEY_ENV: KEY}
        with self.root.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.starts += 1

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        """Kill every process of the run at once, like a power failure."""
        began = time.monotonic()
        kill_marked(self.marker)
        self.kills.append((began, time.monotonic()))
        assert self.process is not None
        self.process.wait()
        while marked(self.marker):
            time.sleep(0.02)

    def loaded(self) -> bool:
        """Whether this start has loaded its policy."""
        return self._ready() > self.ready

    def steps(self) -> int:
        """Return the number of steps done."""
        metrics = self.root / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def _ready(self) -> int:
        events = self.root / "events.jsonl"
        return events.read_text().count('"policy_ready"') if events.exists() else 0


def later(rng: random.Random) -> Moment:
    """Return a moment some time after the policy is loaded, or after a step or two more."""
    wait_s, steps = rng.random() * 3.0, rng.randrange(3)
    since = list[float]()

    def reached(run: CrashedRun) -> bool:
        if not since and run.loaded() and run.steps() >= run.steps_before + steps:
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] > wait_s

    return reached


def among(pattern: str) -> Moment:
    """Return a moment at which a new file, a draft or version, exists after the policy load."""
    before: list[set[Path]] = []

    def reached(run: CrashedRun) -> bool:
        if not before:
            if run.loaded():
                before.append(set(run.root.glob(pattern)))
            return False
        return bool(set(run.root.glob(pattern)) - before[0])

    return reached


def kill_moments(rng: random.Random, kills: int) -> list[tuple[str, Moment]]:
    """Return when to kill; a tenth each inside a checkpoint, a store write and a weight sync."""
    special = max(1, kills // 10)
    found = [(name, among(where)) for name, where in INSIDE.items() for _ in range(special)]
    found += [("random", later(rng)) for _ in range(kills - len(found))]
    rng.shuffle(found)
    return found


def write_config(file: Path, url: str, steps: int, cache: Path, dynamic_sampling: bool) -> None:
    """Write the run's config: short steps, a checkpoint every third, paid teachers."""
    table = tomllib.loads(PRESET.read_text())
    paid = {
        "kind": "openai",
        "base_url": url,
        "api_key_env": KEY_ENV,
        "prompt_usd_per_million": PROMPT_USD * 1e6,
        "completion_usd_per_million": COMPLETION_USD * 1e6,
    }
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": "crash", "steps": steps},
        "policy": {"cache_dir": str(cache)},
        "schedule": {
            "prompts_per_step": PROMPTS,
            "group_size": 4,
            "dynamic_sampling": dynamic_sampling,
        },
        "replay": {
            "actors": 1,
            "budget": {"usd": 100.0},
            "teachers": [{"name": name, "model": name, **paid} for name in TEACHERS],
        },
        "trainer": {"checkpoint_every": 3},
        "weights": {"transport": "disk"},
        "eval": {"episodes": 4},
    }
    for section, keys in changes.items():
        table.setdefault(section, {}).update(keys)
    table["policy"]["warm_start"] |= {"steps": 40, "demonstrations": 200}
    file.write_text(tomli_w.dumps(table))


def wait_for(run: CrashedRun, moment: Moment) -> bool:
    """Return whether the moment came before the run's own end."""
    while not run.ended:
        if moment(run):
            return True
        if time.monotonic() - run.began > LONGEST_WAIT_S:
            raise TimeoutError(f"start {run.starts} has not come so far: see {run.root}.log")
        time.sleep(0.0005)
    return False


def crash(run: CrashedRun, audit: Audit, plan: Sequence[tuple[str, Moment]]) -> list[list[str]]:
    """Kill and resume as planned, then let the run finish; return a row for each kill."""
    rows = []
    for number, (name, moment) in enumerate([*plan, ("end", lambda _: False)], start=1):
        run.start()
        if not wait_for(run, moment):
            break
        run.kill()
        done = audit.look(run.root, f"kill {number}, {name}")
        at_s = f"{run.kills[-1][0] - run.began:.1f}"
        rows.append([f"{number} {name}", at_s, str(done), str(len(audit.seen))])
        print("  ".join(rows[-1]), flush=True)
    assert run.process is not None
    if run.process.returncode:
        raise RuntimeError(f"the last start ended with {run.process.returncode}: {run.root}.log")
    return rows


def main() -> int:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, metavar="N", help="30, or 3 with --quick")
    parser.add_argument("--steps", type=int, metavar="N", help="of the run; as many as fit")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--dynamic-sampling", action="store_true", help="drop and replace groups of equal rewards"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the run stays")
    given = parser.parse_args()
    kills = given.kills or (3 if given.quick else 30)
    report, folder = Report("crash_consistency"), given.keep or Path(mkdtemp(prefix="crash-"))
    folder.mkdir(parents=True, exist_ok=True)
    task = make_task(load_config(PRESET))
    assert isinstance(task, ToolboxTask)
    provider = PaidPanel(task, TEACHERS)
    with ExpertServer(provider, KEY) as server:
        config = folder / "crash.toml"
        steps = given.steps or 3 * kills
        write_config(config, server.base_url, steps, folder / "policies", given.dynamic_sampling)
        audit = Audit(load_config(config).schedule)
        run = CrashedRun(folder / "run", config)
        try:
            rows = crash(run, audit, kill_moments(random.Random(given.seed), kills))
        finally:
            if not run.ended:
                run.kill()
        steps = audit.look(run.root, "end")
    again, lost = provider.twice(run.kills)
    report.print_table(
        f"{len(run.kills)} kills of a run of {steps} steps",
        ("kill", "s after its start", "steps done", "groups finished"),
        rows,
    )
    for note in audit.notes:
        print(note)
    report.figures |= {
        "kills": len(run.kills),
        "steps": steps,
        "charged_usd": provider.charged(),
        "paid_twice_on_its_way_usd": lost,
    }
    report.ratios |= {
        "prompts_skipped": len(audit.skipped),
        "trained_twice": len(audit.twice),
        "traces_lost": len(audit.lost),
        "steps_wrong": len(audit.violations),
        "paid_twice_usd": again - lost,
    }
    report.finish(given.json)
    if given.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
