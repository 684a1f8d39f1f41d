"""A trainer, or a whole run, that is killed: the run goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from finished_work import check_that_finished_work_is_on_disk
from live_run import END_DEADLINE_S, GONE_DEADLINE_S, LiveRun, launched, untimed, wait_until

from composer_mesh.actors.checkpoints.folder import checkpoints_of
from composer_mesh.rollouts.traces import Trace

pytestmark = pytest.mark.timeout(600)

STEPS = 6
SETTINGS = {
    "run.steps": STEPS,
    "schedule.max_lag": 0,
    "eval.episodes": 2,
    "replay.actors": 1,
    "trainer.checkpoint_every": 2,
}


def after_steps(run: LiveRun, count: int) -> None:
    run.until(lambda run: len(run.lines("metrics.jsonl")) >= count, f"step {count}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> LiveRun:
    """The undisturbed run."""
    with launched(tmp_path_factory.mktemp("alone") / "run", policy_cache, SETTINGS) as run:
        assert run.wait() == 0, run.stderr
    return run


def assert_restarted_to_the_same(run: LiveRun, victim: str) -> None:
    (died,) = run.events("actor_died")
    assert died["actor"] == victim
    (restarted,) = run.events("trainer_restarted")
    assert f"{victim} died: " in restarted["detail"]
    assert "to the same losses and gradients" in restarted["detail"]
    assert run.summary()["restarts"] == 1
    assert run.stderr == ""


def assert_same_steps(one: LiveRun, other: LiveRun) -> None:
    steps = [[untimed(step) for step in run.objects("metrics.jsonl")] for run in (one, other)]
    assert json.dumps(steps[0]) == json.dumps(steps[1])


def flipped(checkpoint: Path) -> None:
    """Change a bit of a checkpoint's largest file."""
    file = max(checkpoint.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def test_a_run_whose_trainer_is_killed_trains_the_same_steps_as_one_left_alone(
    alone: LiveRun, tmp_path: Path, policy_cache: Path
) -> None:
    """The disk has damaged the newest checkpoint, so it begins again from what was before that."""
    with launched(tmp_path / "killed", policy_cache, SETTINGS) as run:
        run.until(lambda run: checkpoints_of(run.root), "the first checkpoint")
        after_steps(run, 3)
        trainer = run.pids()["trainer"]
        os.kill(trainer, signal.SIGSTOP)  # it writes no further one
        damaged = checkpoints_of(run.root)[-1]
        flipped(damaged.folder)
        os.kill(trainer, signal.SIGKILL)
        assert run.wait() == 0, run.stderr
    assert_restarted_to_the_same(run, "trainer")
    assert_same_steps(alone, run)
    (aside,) = run.events("quarantined")
    assert aside["detail"].startswith(f"checkpoint of step {damaged.step}: ")
    assert (run.root / "quarantine" / damaged.folder.name).is_dir()
    kept = {one.step for one in checkpoints_of(run.root)}
    assert kept == {2, 4, 6} - {damaged.step}


def test_ranks_of_which_one_is_killed_train_the_same_steps_again(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {**SETTINGS, "trainer.ranks": 2}
    with launched(tmp_path / "killed", policy_cache, settings) as run:
        after_steps(run, 3)
        os.kill(run.pids()["trainer-1"], signal.SIGKILL)
        assert run.wait() == 0, run.stderr
    assert_restarted_to_the_same(run, "trainer-1")
    assert [step["step"] for step in run.objects("metrics.jsonl")] == list(range(1, STEPS + 1))


def test_a_run_that_sigterm_ends_cleanly_and_is_killed_and_goes_on_is_the_undisturbed_run(
    alone: LiveRun, tmp_path: Path, policy_cache: Path
) -> None:
    """All three channels are on. Once it is asked to stop, and once every process is killed."""
    with launched(tmp_path / "stopped", policy_cache, SETTINGS) as stopped:
        after_steps(stopped, 1)
        stopped.process.terminate()
        assert stopped.wait(END_DEADLINE_S) == 128 + signal.SIGTERM
    assert stopped.stderr == ""
    assert len(stopped.events("run_stopped")) == 1
    check_that_finished_work_is_on_disk(stopped)
    options = ("--resume",)
    with launched(tmp_path / "stopped", policy_cache, SETTINGS, options=options) as killed:
        after_steps(killed, 3)
        killed.signal_group(signal.SIGKILL)
        killed.process.wait()
        wait_until(lambda: not killed.living(), "end of the last process", GONE_DEADLINE_S)
    changed = {**SETTINGS, "supervision.trainer_restarts": 4}
    root = tmp_path / "stopped"
    with launched(root, policy_cache, changed, options=options, as_installed=True) as run:
        assert run.wait() == 0, run.stderr
    assert len(run.events("run_resumed")) == 2
    (change,) = run.events("config_changed")
    assert "supervision.trainer_restarts: 3 -> 4" in change["detail"]
    assert_same_steps(alone, run)
    assert sorted(alone.traces(), key=trace_id) == sorted(run.traces(), key=trace_id)
    assert alone.objects("evaluations.jsonl") == run.objects("evaluations.jsonl")
    assert not run.events("quarantined")


def trace_id(trace: Trace) -> str:
    return trace.trace_id
