"""A run as a user starts it: the real command line in a session of its own, seen from outside.

It looks at files and processes only; what they must be is said by the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from commands import Process, current_environment, finished, forked, started

from composer_mesh.mesh.processes import is_alive, kill
from composer_mesh.mesh.pyspy import find_pyspy
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader

T = TypeVar("T")

PRESET = Path(__file__).resolve().parents[3] / "configs" / "quickstart.toml"
SHORT = {
    "run.steps": 3,
    "policy.warm_start.steps": 20,
    "policy.warm_start.demonstrations": 200,
    "schedule.prompts_per_step": 2,
    "schedule.group_size": 4,
    "replay.delivery": "same_step",
    "eval.episodes": 8,
}
"""A few steps, each with all three channels; late pairs have tests of their own."""
ENDLESS = {"run.steps": 1000, "eval.episodes": 2, "replay.actors": 1}
"""For a run that a test ends itself."""

RUN_DEADLINE_S = 240.0
"""Of a whole run, its warm start included, on a machine that is busy with other things."""
END_DEADLINE_S = 90.0
"""From the event that ends a run to its last process."""
GONE_DEADLINE_S = 60.0
"""From the end of the command to that of the last process it started."""
POLL_S = 0.02


def untimed(step: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step that a repetition of it has too."""
    timed = ("time/", "store/", "weights/hidden_share", "generator/")
    return {key: value for key, value in step.items() if not key.startswith(timed)}


def wait_until(condition: Callable[[], T], what: str, deadline_s: float) -> T:
    """The first true value of a condition; fails at the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"after {deadline_s:g} s there is still no: {what}"
        time.sleep(POLL_S)
    return value


def composer_mesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A short command, run to its end."""
    return finished(arguments, RUN_DEADLINE_S)


def tree_of(root: Path) -> subprocess.CompletedProcess[str]:
    """`tree --json` of a live run; again while processes are too busy to answer within seconds."""

    def looked() -> subprocess.CompletedProcess[str] | None:
        done = composer_mesh("tree", str(root), "--json")
        about = {} if done.returncode else json.loads(done.stdout)
        return done if done.returncode or (about["mesh"] and not about["missing"]) else None

    found = wait_until(looked, "answer of the mesh", RUN_DEADLINE_S)
    assert found is not None
    return found


def can_read_stacks() -> bool:
    """Whether py-spy is there, and the system lets it read what it did not start."""
    return find_pyspy() is not None and os.geteuid() == 0


@dataclass
class LiveRun:
    """A `train` or `sft` command and the directory it writes."""

    root: Path
    process: Process

    @property
    def stdout(self) -> str:
        return self.root.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self.root.with_suffix(".err").read_text()

    def lines(self, name: str) -> list[str]:
        """The complete lines of a file, however far it is written."""
        path = self.root / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def objects(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(name)]

    def traces(self) -> list[Trace]:
        """The rollouts that are stored, group by group."""
        with RunReader(self.root) as reader:
            return list(reader.all_traces())

    def pairs(self) -> list[PreferencePair]:
        """The pairs that are stored, in the order in which they came."""
        with RunReader(self.root) as reader:
            return [pair_from_json(row.body) for row in reader.pairs()]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.root / "summary.json").read_text())
        return summary

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.objects("events.jsonl") if event["event"] == kind]

    def pids(self) -> dict[str, int]:
        """The processes of the actors that have answered, by the actors' names."""
        started = self.events("actor_started")
        return {event["actor"]: int(event["detail"].split()[-1]) for event in started}

    def until(self, condition: Callable[[LiveRun], T], what: str) -> T:
        """Wait for something that the run does; fails when the run ends first."""

        def seen() -> T:
            value = condition(self)
            assert value or self.process.poll() is None, f"ended early: {self.stderr}"
            return value

        return wait_until(seen, what, RUN_DEADLINE_S)

    def until_training(self) -> None:
        """Wait until the first step is done: every channel has been through every actor."""
        self.until(lambda run: run.lines("metrics.jsonl"), "first step")

    def signal_group(self, number: signal.Signals) -> None:
        """As a terminal does: to the command and to all that it started."""
        os.killpg(self.process.pid, number)

    def wait(self, deadline_s: float = RUN_DEADLINE_S) -> int:
        """The exit status; afterwards no process of the run is left."""
        status = self.process.wait(deadline_s)
        wait_until(lambda: not self.living(), "end of the last process", GONE_DEADLINE_S)
        return status

    def living(self) -> list[int]:
        """The processes of this run that are there, the command among them."""
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [pid for pid in pids if self._has(pid) and is_alive(pid)]

    def _has(self, pid: int) -> bool:
        """Whether a process is of the run's session, or forked for it by the tests' own server."""
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")
            forked = title.startswith("composer-mesh ") and title.endswith(f" {self.process.pid}")
            return forked or os.getsid(pid) == self.process.pid
        except (ProcessLookupError, FileNotFoundError):
            return False


@contextmanager
def launched(
    root: Path,
    cache: Path,
    settings: Mapping[str, Any],
    folder: Path | None = None,
    options: Sequence[str] = (),
    within: Sequence[str] = (),
    as_installed: bool = False,
    variables: Mapping[str, str] | None = None,
    command: str = "train",
) -> Iterator[LiveRun]:
    """Start a command on the shortened preset, in a working directory or in the tests' own.

    `as_installed` starts an interpreter for it as users do, and so does `within`, which is put
    before the command. `variables` are added to the environment. What still lives at the end of
    the block is killed.
    """
    environment = {**current_environment(), **(variables or {})}
    values = {**SHORT, "policy.cache_dir": cache, **settings}
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    words = [command, str(PRESET), *overrides, "--output", str(root), *options]
    with root.with_suffix(".out").open("wb") as out, root.with_suffix(".err").open("wb") as err:
        if within or as_installed:
            process = started(words, out, err, folder, within, environment)
        else:
            process = forked(words, out, err, folder, environment)
    run = LiveRun(root, process)
    try:
        yield run
    finally:
        for pid in run.living():
            kill(pid)
        process.wait()
