"""A run that is launched, left alone by its launcher, looked into, stopped and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import (
    END_DEADLINE_S,
    ENDLESS,
    PRESET,
    RUN_DEADLINE_S,
    SHORT,
    composer_mesh,
    tree_of,
    untimed,
    wait_until,
)

from composer_mesh.mesh.processes import is_alive, kill
from composer_mesh.services.directory.status import read_status
from composer_mesh.services.launch.by_ssh import pid_of
from composer_mesh.services.launch.handle import read_handle

SETTINGS = SHORT | ENDLESS | {"schedule.max_lag": 0, "trainer.lr_schedule": "constant"}


class Launched:
    """A run that nobody here is the parent of; looked at through its files and its session."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def log(self) -> str:
        log = self.root / "launch" / "controller.log"
        return log.read_text() if log.exists() else ""

    @property
    def controller(self) -> int:
        handle = read_handle(self.root)
        assert handle is not None
        return pid_of(handle.job)

    def metrics(self) -> list[str]:
        path = self.root / "metrics.jsonl"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def living(self) -> list[int]:
        """The controller and all that it has started."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if _session(pid) == self.controller and is_alive(pid)]

    def until_steps(self, count: int) -> None:
        def seen() -> bool:
            there = len(self.metrics()) >= count
            assert there or is_alive(self.controller), f"ended early: {self.log}"
            return there

        wait_until(seen, f"step {count}", RUN_DEADLINE_S)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    """The run of a test; what it has left at the end is killed."""
    run = Launched(tmp_path / "run")
    yield run
    if (run.root / "launch.json").exists():
        for pid in run.living():
            kill(pid)


def words(run: Launched, cache: Path, *more: str, config: Path = PRESET) -> list[str]:
    values = {**SETTINGS, "policy.cache_dir": cache} if config == PRESET else {}
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["launch", str(config), *overrides, "--output", str(run.root), *more]


def test_a_launched_run_outlives_its_launcher_stops_with_a_checkpoint_and_goes_on_to_its_end(
    run: Launched, policy_cache: Path
) -> None:
    place = str(run.root)
    command = [sys.executable, "-m", "composer_mesh", *words(run, policy_cache)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    told = [launcher.stdout.readline() for _ in range(10)]
    assert told[0].startswith(f"launched {run.root} as local ")
    run.until_steps(1)
    launcher.kill()
    launcher.communicate()

    run.until_steps(len(run.metrics()) + 1)
    assert composer_mesh(*words(run, policy_cache, "--resume")).returncode == 2  # it goes on
    about = json.loads(tree_of(run.root).stdout)
    assert (about["state"], about["mesh"]) == ("running", True)
    assert "run_started" in composer_mesh("events", place).stdout
    scaled = composer_mesh("scale", place, "generator=2")
    assert (scaled.returncode, scaled.stdout) == (0, "generator: 1 -> 2\n")
    everyone = run.living()
    assert len(everyone) > 4

    stopped = composer_mesh("stop", place)
    assert stopped.returncode == 0, stopped.stderr
    steps = len(run.metrics())
    assert f"stopped after step {steps} of 1000" in stopped.stdout
    assert f"continues from step {steps}'s checkpoint, and trains nothing again" in stopped.stdout
    assert (run.root / "checkpoints" / f"step-{steps}").is_dir()
    wait_until(lambda: not run.living(), "end of every process", END_DEADLINE_S)
    status = read_status(run.root)
    assert status is not None
    assert status.state == "stopped"

    resume = stopped.stdout.splitlines()[-1].removeprefix("continue with: composer-mesh ").split()
    ended = composer_mesh(*resume, "--set", f"run.steps={steps + 1}")
    assert ended.returncode == 0, ended.stderr
    assert "run_finished" in ended.stdout
    resumed = [event for event in ended.stdout.splitlines() if "run_resumed" in event]
    assert f"resumes from step {steps}'s checkpoint, 0 of them are trained again" in resumed[0]
    numbers = [untimed(json.loads(line))["step"] for line in run.metrics()]
    assert numbers == list(range(1, steps + 2))

    again = composer_mesh(*resume, "--set", f"run.steps={steps + 1}")
    assert (again.returncode, again.stdout.startswith("nothing to do: ")) == (0, True)
