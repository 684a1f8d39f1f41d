"""The batch job of a run in a real Slurm, with a controller and workers that train nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tomli_w
from cluster import NODE_LOSS_S, SlurmCluster

from composer_mesh.configs.load import read_table, resolve_config
from composer_mesh.mesh.processes import is_alive
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.plugins.slurm.launcher import SlurmLauncher
from composer_mesh.plugins.slurm.script import JobFiles
from composer_mesh.services.launch.ports import Handle, Order
from composer_mesh.services.launch.workers import config_file, write_files

T = TypeVar("T")
PRESET = Path(__file__).parents[4] / "configs" / "quickstart.toml"
DEADLINE_S, CANCEL_S = 120.0, 15.0
ENDLESS = {"steps": 100_000, "step_s": 0.05}


def until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"after {deadline_s:g} s there is still no: {what}"
        time.sleep(0.1)
    return value


@dataclass
class Job:
    """A job that was submitted, and what can be seen of it from outside."""

    launcher: SlurmLauncher
    handle: Handle
    slurm: SlurmCluster

    @property
    def run(self) -> Path:
        return self.handle.run

    @property
    def log(self) -> str:
        log = JobFiles(self.run).log
        return log.read_text() if log.exists() else ""

    @property
    def word(self) -> str:
        return self.launcher.state(self.handle)[1]

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    def records(self) -> list[dict[str, Any]]:
        files = sorted((self.run / "hosts").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    def pids(self) -> list[int]:
        controller = int((self.run / "controller.pid").read_text())
        return [controller, *(record["pid"] for record in self.records())]

    def until_step(self, step: int) -> None:
        until(lambda: f"\nstep {step}\n" in self.log, f"step {step} in\n{self.log}")

    def until_ended(self, deadline_s: float = DEADLINE_S) -> str:
        until(lambda: self.launcher.state(self.handle)[0] == "ended", "end", deadline_s)
        return self.word


Submit = Callable[..., Job]


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path, fake_python: str) -> Submit:
    """Launch a fake run on so many nodes; keywords are settings of the job, then of the run."""

    def submitted(hosts: int = 1, run: dict[str, Any] = ENDLESS, **settings: Any) -> Job:
        table = read_table(PRESET)
        table["cluster"] = {"kind": "slurm", "slurm": {"time_limit": "10", **settings}}
        host = {"name": "gpu", "count": hosts, "cores": 1, "memory_gb": 3.5}
        table["placement"] = {"hosts": [host]}
        config = resolve_config(table, [], "test")
        output = tmp_path / "a run's %j"
        order = Order(config, described_hosts(config.placement), output, tmp_path, fake_python)
        launcher = SlurmLauncher(look_s=0.1, ask_s=0.5)
        plan = launcher.plan(order)
        write_files(plan)
        config_file(output).write_text(tomli_w.dumps({"hosts": hosts, **run}))
        return Job(launcher, launcher.submit(order, plan), slurm)

    return submitted


def test_a_job_runs_its_controller_and_one_named_worker_on_each_node(submit: Submit) -> None:
    job = submit(hosts=2, run={"steps": 5, "step_s": 0.1})
    lines = list(job.launcher.follow(job.handle))
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {n}" for n in range(1, 6)
    ]
    assert lines[-1] == f"job {job.handle.job} has ended: COMPLETED"
    found = {record["name"]: record["node"] for record in job.records()}
    assert found == {"gpu-0": "node-a", "gpu-1": "node-b"}
    logs = {file.name for file in JobFiles(job.run).folder.glob("*.log")}
    own = f"slurm-{job.handle.job}.log"
    assert logs == {"controller.log", "worker-gpu-0.log", "worker-gpu-1.log", own}


def test_a_job_that_waits_says_so_and_is_followed_to_its_end(submit: Submit) -> None:
    job = submit(run={"steps": 2, "step_s": 0.1}, options=["--hold"])
    lines = job.launcher.follow(job.handle)
    assert next(lines) == f"job {job.handle.job} waits: PENDING (JobHeldUser)"
    job.slurm.run("scontrol", "release", job.handle.job)
    assert "step 2" in list(lines)


def test_scancel_ends_everything_within_15_s_and_queues_nothing(submit: Submit) -> None:
    job = submit(hosts=2, run={**ENDLESS, "deaf": True})
    job.until_step(1)
    pids, began = job.pids(), time.monotonic()
    job.slurm.run("scancel", job.handle.job)
    until(lambda: not any(map(is_alive, pids)), "end of all processes", CANCEL_S)
    assert job.until_ended().startswith("CANCELLED")
    assert time.monotonic() - began < CANCEL_S
    assert "queued again" not in job.log


def test_a_stop_writes_a_checkpoint_and_queues_nothing(submit: Submit) -> None:
    job = submit()
    job.until_step(1)
    pids = job.pids()
    job.launcher.stop(job.handle, grace_s=60)
    assert job.word == "COMPLETED"
    assert f"checkpoint at step {len(job.steps())}" in job.log
    assert not any(map(is_alive, pids))
    assert "queued again" not in job.log


def test_a_stop_ends_a_controller_that_does_not_listen(submit: Submit) -> None:
    job = submit(run={**ENDLESS, "deaf": True})
    job.until_step(1)
    pids = job.pids()
    job.launcher.stop(job.handle, grace_s=1)
    assert job.word.startswith("CANCELLED")
    assert not any(map(is_alive, pids))


def test_a_job_that_waits_is_stopped_at_once(submit: Submit) -> None:
    job = submit(options=["--hold"])
    job.launcher.stop(job.handle, grace_s=60)
    assert job.word.startswith("CANCELLED")
    assert not job.log


def test_a_job_is_queued_again_before_its_time_limit_and_loses_no_step(submit: Submit) -> None:
    """Slurm sends the signal 30 to 90 s before the limit of two minutes."""
    job = submit(time_limit="2", grace_s=30, run={"steps": 2400, "step_s": 0.05})
    until(lambda: "queued again after step" in job.log, "second job", 150)
    until(lambda: "(BeginTime)" in job.word, "job that waits")
    assert "checkpoint at step" in job.log
    job.slurm.start_now(job.handle.job)
    until(lambda: "start 2 on" in job.log, "second start")
    assert job.until_ended(180) == "COMPLETED"
    assert job.steps() == list(range(1, 2401))


def test_a_run_that_makes_no_step_in_a_whole_job_is_not_queued_again(submit: Submit) -> None:
    job = submit(run={**ENDLESS, "hangs_at": 0})
    until(lambda: "goes on after" in job.log, "start")
    job.slurm.run("scancel", "--batch", "--signal=TERM", job.handle.job)
    until(lambda: "(BeginTime)" in job.word, "job that waits")
    job.slurm.start_now(job.handle.job)
    until(lambda: job.log.count("goes on after") == 2, "second start")
    job.slurm.run("scancel", "--batch", "--signal=TERM", job.handle.job)
    assert job.until_ended() == "FAILED"
    assert job.log.count("queued again after step 0") == 1
    assert "it is not queued again" in job.log


def test_a_run_that_fails_is_not_queued_again(submit: Submit) -> None:
    job = submit(run={"steps": 5, "step_s": 0.05, "fails_at": 2})
    assert job.until_ended() == "FAILED"
    assert "the controller ended with status 1" in job.log
    assert "queued again" not in job.log


def test_a_job_goes_on_without_a_node_that_is_lost(submit: Submit) -> None:
    job = submit(hosts=2)
    job.until_step(1)
    lost = next(record for record in job.records() if record["node"] == "node-b")
    job.slurm.lose("node-b")
    try:
        os.kill(lost["pid"], 9)
        until(lambda: job.slurm.node_state("node-b").startswith("down"), "lost node", NODE_LOSS_S)
        job.until_step(len(job.steps()) + 40)
        assert job.word == "RUNNING"
    finally:
        job.slurm.end_jobs()
        job.slurm.bring_back("node-b")


def test_a_command_runs_where_the_controller_is(submit: Submit, tmp_path: Path) -> None:
    job = submit()
    job.until_step(1)
    command = [
        *SlurmLauncher().reach(job.handle),
        job.handle.python,
        "-P",
        "-m",
        "composer_mesh",
        "tree",
        "a b; *",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    assert told["said"] == ["tree", "a b; *"]
    assert told["folder"] == str(tmp_path)


def test_a_job_that_does_not_run_cannot_be_reached_and_says_so(submit: Submit) -> None:
    job = submit(options=["--hold"])
    command = [
        *SlurmLauncher().reach(job.handle),
        job.handle.python,
        "-P",
        "-m",
        "composer_mesh",
        "tree",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75
    assert f"job {job.handle.job} is PENDING" in done.stderr
