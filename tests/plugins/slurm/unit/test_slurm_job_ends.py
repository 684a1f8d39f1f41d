"""How the batch job of a run ends, and whether it is queued again: with a fake Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from fake_slurm import FakeMesh
from slurm_jobs import Job, ended, job, mesh, said, slurm

__all__ = ["job", "mesh", "slurm"]


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


def test_without_resubmit_the_job_ends_at_its_time_limit(job: Callable[..., Job]) -> None:
    one = job(resubmit=False)
    process = one.start()
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 143
    assert "go on with composer-mesh launch --resume" in printed
    assert not one.requeues


@pytest.mark.parametrize("word", ["COMPLETING", "CANCELLED", "PENDING", "REQUEUED"])
def test_a_job_that_slurm_is_ending_is_not_queued_again(job: Callable[..., Job], word: str) -> None:
    one = job()
    process = one.start()
    one.slurm.answers("squeue", f"{word}\n")
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 143
    assert f"the job is {word}; everything ends" in printed
    assert not one.requeues


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


@pytest.mark.parametrize(("word", "status"), [("", 1), ("A_WORD_OF_SLURM_99", 0)])
def test_a_job_of_which_slurm_says_nothing_clear_writes_a_checkpoint_and_ends(
    job: Callable[..., Job], word: str, status: int
) -> None:
    one = job()
    process = one.start()
    one.slurm.answers("squeue", word, status=status, error="Unable to contact slurmctld")
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 143
    assert f"Slurm says '{word}' of the job" in printed
    assert "checkpoint" in one.places.log.read_text()
    assert not one.requeues


def test_a_run_that_is_told_to_stop_is_not_queued_again(job: Callable[..., Job]) -> None:
    one = job()
    process = one.start()
    one.places.stopping.touch()
    process.send_signal(signal.SIGTERM)
    status, printed = ended(process)
    assert status == 0
    assert "the run has stopped after step 0" in printed
    assert "checkpoint" in one.places.log.read_text()
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
