"""The batch job of a run, as the real script with programs that stand for Slurm's."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import FakeMesh, FakeSlurm
from slurm_jobs import Job, ended, job, mesh, slurm

__all__ = ["job", "mesh", "slurm"]


def test_the_scripts_are_bash_without_a_complaint(job: Callable[..., Job]) -> None:
    one = job(setup=["module load cuda"])
    for script in (one.places.script.read_text(), one.reach[2]):
        checked = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")


def test_shellcheck_has_no_complaint(job: Callable[..., Job]) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt install shellcheck")
    one = job()
    quoted = "--exclude=SC2016"  # values with a $ that must stay one
    for script in (one.places.script.read_text(), one.reach[2]):
        checked = subprocess.run(
            ["shellcheck", quoted, "-"], input=script, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout


def test_each_node_has_a_worker_by_its_name_and_the_first_the_controller(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job()
    process = one.start()
    run = str(one.places.run)
    assert json.loads(mesh.until("controller")) == [
        *("-P", "-m", "composer_mesh", "train", f"{run}/launch/config.toml"),
        *("--output", run, "--auto-resume"),
    ]
    for name in ("gpu-0", "gpu-1"):
        words = json.loads(mesh.until(f"worker-{name}"))
        assert words[:4] == ["-P", "-m", "composer_mesh", "worker"]
        assert words[words.index("--roster") + 1] == f"{run}/hosts"
        assert words[words.index("--authority") + 1] == f"{run}/.tls"
        assert words[-2:] == ["--name", name]
        assert "listens" in (one.places.folder / f"worker-{name}.log").read_text()
    mesh.ends(0)
    status, printed = ended(process)
    assert status == 0
    assert "the run has finished" in printed
    assert one.places.job.read_text() == "17\n"
    assert not one.requeues


def test_the_lines_of_setup_come_first_and_reach_every_process(job: Callable[..., Job]) -> None:
    one = job(setup=["unset UNSET", 'echo "set up $UNSET"'])
    process = one.start()
    one.mesh.ends(0)
    assert ended(process)[1].startswith("set up \n")


@pytest.mark.parametrize("knows", [True, False])
def test_steps_may_overlap_only_where_slurm_knows_the_word(
    job: Callable[..., Job], slurm: FakeSlurm, knows: bool
) -> None:
    one = job()
    slurm.knows_overlap(knows)
    process = one.start()
    one.mesh.ends(0)
    ended(process)
    (call,) = slurm.calls("srun")
    assert ("--overlap" in call) is knows


def test_records_of_an_earlier_job_are_gone_before_a_worker_starts(job: Callable[..., Job]) -> None:
    one = job()
    roster = one.places.run / "hosts"
    roster.mkdir(parents=True)
    (roster / "gpu-0.json").write_text("{}")
    process = one.start()
    assert not list(roster.iterdir())
    one.mesh.ends(0)
    ended(process)


def test_a_reached_command_keeps_its_words_and_runs_beside_the_controller(
    job: Callable[..., Job], slurm: FakeSlurm, tmp_path: Path
) -> None:
    one = job(setup=["echo noise", "export SET_UP=yes"])
    one.places.job.write_text("17\n")
    slurm.answers("squeue", "RUNNING node-1\n")
    command = [*one.reach, "sh", "-c", 'echo "$1 $SET_UP"', "sh", "a  b; *"]
    done = subprocess.run(
        command, env={**os.environ, **slurm.path()}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "a  b; * yes\n"
    (call,) = slurm.calls("srun")
    words = shlex.split(call.partition(" bash -c ")[0])
    assert words[1:5] == ["--jobid=17", "--nodes=1", "--ntasks=1", "--nodelist=node-1"]
    assert {"--overlap", f"--chdir={tmp_path}"} <= set(words)


def test_a_job_that_waits_cannot_be_reached(job: Callable[..., Job], slurm: FakeSlurm) -> None:
    one = job()
    one.places.job.write_text("17\n")
    slurm.answers("squeue", "PENDING n/a\n")
    done = subprocess.run(
        [*one.reach, "true"],
        env={**os.environ, **slurm.path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75
    assert "job 17 is PENDING" in done.stderr
