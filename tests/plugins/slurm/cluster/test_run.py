"""Real runs as jobs of a real Slurm, from the command line to the last process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from cluster import SlurmCluster
from live_run import SHORT, LiveRun, composer_mesh, wait_until

from composer_mesh.configs.load import read_table
from composer_mesh.mesh.processes import is_alive
from composer_mesh.plugins.slurm.launcher import SlurmLauncher
from composer_mesh.plugins.slurm.script import JobFiles
from composer_mesh.services.launch.handle import read_handle
from composer_mesh.services.launch.ports import Handle

PRESET = Path(__file__).parents[4] / "configs" / "quickstart.toml"
STEP_S, LIMIT_S, RUN_S = 600.0, 240.0, 900.0
CANCEL_S = 15.0
ENDLESS = {**SHORT, "run.steps": 5000, "eval.episodes": 2, "trainer.lr_schedule": "constant"}

pytestmark = pytest.mark.timeout(1200)


class JobRun(LiveRun):
    """A launched run: its directory, and the command that follows it."""

    @property
    def handle(self) -> Handle:
        handle = read_handle(self.root)
        assert handle is not None, self.stderr
        return handle

    @property
    def log(self) -> str:
        log = JobFiles(self.root).log
        return log.read_text() if log.exists() else ""

    def until_step(self, count: int) -> None:
        self._wait(lambda: len(self.lines("metrics.jsonl")) >= count, f"step {count}", STEP_S)

    def until_said(self, words: str, deadline_s: float) -> None:
        self._wait(lambda: words in self.log, f"{words!r} in the log", deadline_s)

    def _wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        try:
            wait_until(condition, what, deadline_s)
        except AssertionError as error:
            error.add_note(self.log)  # as it is now, not as it was before the wait
            raise

    def steps(self) -> list[int]:
        return [step["step"] for step in self.objects("metrics.jsonl")]

    def processes(self) -> list[int]:
        """All that the job has started and that is there, whoever its parent is now."""
        marks = {
            f"{name}={value}".encode()
            for name, value in (
                ("SLURM_JOB_ID", self.handle.job),
                ("SLURM_CONF", os.environ["SLURM_CONF"]),
            )
        }
        return [pid for pid in _pids() if marks <= set(_environment(pid)) and is_alive(pid)]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> Sequence[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def launch(
    folder: Path, cache: Path, hosts: int, slurm: Mapping[str, Any], **settings: Any
) -> JobRun:
    """`composer-mesh launch` on so many nodes, following the run."""
    table = read_table(PRESET)
    table["cluster"] = {"kind": "slurm", "attach_s": 120.0, "slurm": dict(slurm)}
    host = {"name": "node", "count": hosts, "cores": 2, "memory_gb": 3.5}
    table["placement"] = {"hosts": [host]}
    config, run = folder / "run.toml", folder / "run"
    config.write_text(tomli_w.dumps(table))
    values = {"policy.cache_dir": cache, **settings}
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "composer_mesh", "launch", str(config), *overrides]
    with run.with_suffix(".out").open("wb") as out, run.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [*command, "--output", str(run)], stdout=out, stderr=err, cwd=folder
        )
    launched = JobRun(run, process)
    launched.until(lambda _: (run / "launch.json").exists(), "a handle")
    return launched


def check_nothing_is_lost(run: JobRun) -> None:
    """Steps without a gap, every file as it was written, every trained rollout in the store."""
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    checked = composer_mesh("verify", str(run.root))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = sum(step["rollouts/count"] for step in run.objects("metrics.jsonl"))
    assert len(run.traces()) >= trained


def test_the_quickstart_passes_as_a_job_and_is_seen_from_outside(
    slurm: SlurmCluster, tmp_path: Path, policy_cache: Path
) -> None:
    run = launch(tmp_path, policy_cache, 1, {"time_limit": "60"})
    run.until_step(1)
    about = json.loads(composer_mesh("tree", str(run.root), "--json").stdout)
    assert (about["state"], about["mesh"]) == ("running", True)
    handle = run.handle
    command = [
        *SlurmLauncher().reach(handle),
        handle.python,
        "-P",
        "-m",
        "composer_mesh",
        "tree",
        str(handle.run),
    ]
    reached = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(reached.stdout)["run"] == about["run"]

    assert run.process.wait(RUN_S) == 0, run.stderr + run.log
    assert f"job {handle.job} has ended: COMPLETED" in run.stdout
    measured = run.summary()["eval"]
    assert measured["initial"]["success"] < 0.4
    assert measured["final"]["success"] > 0.9
    check_nothing_is_lost(run)
    assert not run.processes()


def test_a_run_that_its_time_limit_stops_goes_on_in_the_next_job_and_loses_nothing(
    slurm: SlurmCluster, tmp_path: Path, policy_cache: Path
) -> None:
    """Slurm sends the signal 30 to 90 s before the limit of three minutes."""
    run = launch(tmp_path, policy_cache, 1, {"time_limit": "3", "grace_s": 30}, **ENDLESS)
    run.until_said("queued again after step", LIMIT_S)
    wait_until(lambda: "BeginTime" in slurm.jobs(), "job that waits", CANCEL_S)
    before = run.steps()
    assert f"queued again after step {len(before)}\n" in run.log
    assert not run.processes()

    slurm.start_now(run.handle.job)
    run.until_step(len(before) + 3)
    assert run.steps()[: len(before)] == before
    resumed = run.events("run_resumed")
    assert len(resumed) == 1
    stopped = composer_mesh("stop", str(run.root))
    assert stopped.returncode == 0, stopped.stderr
    run.process.wait(CANCEL_S + 20)
    assert slurm.jobs() == ""
    check_nothing_is_lost(run)


def test_scancel_ends_every_process_of_a_run_within_15_s(
    slurm: SlurmCluster, tmp_path: Path, policy_cache: Path
) -> None:
    run = launch(tmp_path, policy_cache, 2, {}, **ENDLESS)
    run.until_step(2)
    assert len(run.processes()) > 8
    began = time.monotonic()
    slurm.run("scancel", run.handle.job)
    wait_until(lambda: not run.processes(), "end of every process", CANCEL_S)
    print(f"scancel ended everything within {time.monotonic() - began:.1f} s")
    wait_until(lambda: slurm.jobs() == "", "end of the job", 60)
    assert run.process.wait(60) != 0
    assert "queued again" not in run.log
    assert composer_mesh("verify", str(run.root)).returncode == 0
