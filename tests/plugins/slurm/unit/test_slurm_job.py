"""The batch job of a run, as the real script with programs that stand for Slurm's.

Also how the job ends, and whether it is queued again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import FakeMesh, FakeSlurm
from slurm_jobs import Job, ended, job, mesh, said, slurm

__all__ = ["job", "mesh", "slurm"]


@pytest.mark.parametrize("checker", ["bash -n", "shellcheck --exclude=SC2016 -"])
def test_the_scripts_are_bash_without_a_complaint(job: Callable[..., Job], checker: str) -> None:
    command = checker.split()  # without SC2016: values with a $ that must stay one
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: apt install {command[0]}")
    one = job(setup=["echo set up"])
    for script in (one.places.script.read_text(), one.reach[2]):
        checked = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert checked.stderr == ""


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


def test_before_the_time_limit_a_checkpoint_is_written_and_the_job_queued_again(
    job: Callable[..., Job],
) -> None:
    one = job()
    one.steps(3)
    process = one.start()
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 0
    assert "queued again after step 3" in printed
    assert "checkpoint" in one.places.log.read_text()
    assert one.requeues == ["scontrol requeue 17"]


def test_a_controller_that_writes_too_long_does_not_cost_the_next_job(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job(grace_s=1)
    one.steps(3)
    mesh.deaf()
    process = one.start()
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 0
    assert "it is killed" in printed
    assert one.requeues == ["scontrol requeue 17"]


CHECKPOINT = "checkpoint"


@pytest.mark.parametrize(
    ("resubmit", "stopping", "squeue", "status", "words", "log"),
    [
        (False, False, "RUNNING", 143, "continue with composer-mesh launch --resume", CHECKPOINT),
        (True, True, "RUNNING", 0, "the run has stopped after step 0", CHECKPOINT),
        *(
            (True, False, word, 143, f"the job is {word}; everything ends", "")
            for word in ("COMPLETING", "CANCELLED", "PENDING", "REQUEUED")
        ),
        (True, False, "", 143, "Slurm says '' of the job", CHECKPOINT),
        (True, False, "A_NEW_WORD", 143, "Slurm says 'A_NEW_WORD' of the job", CHECKPOINT),
    ],
)
def test_a_job_is_queued_again_at_its_time_limit_alone(
    job: Callable[..., Job],
    resubmit: bool,
    stopping: bool,
    squeue: str,
    status: int,
    words: str,
    log: str,
) -> None:
    one = job(resubmit=resubmit)
    process = one.start()
    if stopping:
        one.places.stopping.touch()
    one.slurm.answers("squeue", squeue, status=0 if squeue else 1, error="Unable to contact it")
    process.send_signal(signal.SIGTERM)
    found, printed = ended(process)
    assert (found, one.requeues) == (status, [])
    assert words in printed
    assert log in one.places.log.read_text()


def test_a_cancelled_job_ends_a_controller_that_does_not_listen(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job()
    mesh.deaf()
    process = one.start()
    one.slurm.answers("squeue", "COMPLETING\n")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 128 + signal.SIGKILL


def test_a_cancel_ends_a_job_that_is_writing_its_last_checkpoint(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job(grace_s=3000)
    mesh.deaf()
    process = one.start()
    process.send_signal(signal.SIGTERM)
    said(process, "ends soon")
    one.slurm.answers("squeue", "COMPLETING\n")
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 128 + signal.SIGKILL
    assert "everything ends" in printed
    assert not one.requeues


def test_a_job_that_was_queued_again_before_it_was_stopped_starts_nothing(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job()
    one.places.stopping.touch()
    status, printed = ended(one.slurm.start(one.places.script))
    assert status == 0
    assert "nothing starts" in printed
    assert not (mesh.folder / "controller").exists()


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_run_that_fails_is_not_queued_again(job: Callable[..., Job], status: int) -> None:
    one = job()
    process = one.start()
    one.mesh.ends(status)
    assert ended(process)[0] == status
    assert not one.requeues


def test_a_run_that_fails_at_its_time_limit_is_not_queued_again(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job()
    mesh.deaf()
    process = one.start()
    process.send_signal(signal.SIGTERM)
    said(process, "ends soon")  # an interpreter that is ending anyway would die of the signal
    one.mesh.ends(1)
    assert ended(process)[0] == 1
    assert not one.requeues


def test_a_run_that_makes_no_step_in_a_whole_job_is_queued_again_only_once(
    job: Callable[..., Job],
) -> None:
    one = job()
    one.steps(4)
    first = one.start()
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 0
    again = one.slurm.start(one.places.script, SLURM_RESTART_COUNT="1")
    said(again, "start 2 on")
    again.send_signal(signal.SIGTERM)
    status, printed = ended(again)
    assert status == 1
    assert "no step was finished since" in printed
    assert len(one.requeues) == 1


def test_where_slurm_requeues_nothing_a_new_job_goes_on(job: Callable[..., Job]) -> None:
    one = job()
    process = one.start()
    one.slurm.answers("scontrol", status=1, error="Job requeue disabled")
    one.slurm.answers("sbatch", "18;cluster\n")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    script = str(one.places.script)
    assert one.slurm.calls("sbatch") == [f"sbatch --parsable --dependency=afterany:17 {script}"]
    assert one.places.job.read_text() == "18\n"


def test_workers_that_outlive_a_failed_controller_end_with_the_job(
    job: Callable[..., Job], mesh: FakeMesh
) -> None:
    one = job()
    process = one.start()
    group = os.getpgid(process.pid)
    one.mesh.ends(1)
    ended(process)  # its output ends when the last process that holds it has
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
