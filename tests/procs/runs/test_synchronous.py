"""A synchronous run whose trainer or controller is killed: it goes on as if it had not been."""

from __future__ import annotations

import signal

from finished_work import check_steps_are_on_disk
from restarted import assert_restarted_to_the_same, assert_same_steps
from shared_runs import SYNCHRONOUS, Finished, Resumed

from composer_mesh.actors.checkpoints.folder import checkpoints_of
from composer_mesh.rollouts.traces import Trace

STEPS = SYNCHRONOUS["run.steps"]


def trace_id(trace: Trace) -> str:
    return trace.trace_id


def test_no_rollout_of_a_synchronous_run_is_older_than_its_step(synchronous: Finished) -> None:
    assert synchronous.status == 0, synchronous.run.stderr
    steps = synchronous.run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["lag/max"] for step in steps] == [0] * STEPS


def test_a_run_whose_trainer_is_killed_trains_the_same_steps_as_one_left_alone(
    synchronous: Finished, trainer_killed: Finished
) -> None:
    """The disk has damaged the newest checkpoint, so it begins again from what was before that."""
    assert synchronous.status == 0, synchronous.run.stderr
    run, damaged = trainer_killed.run, trainer_killed.seen["damaged"]
    assert trainer_killed.status == 0, run.stderr
    assert_restarted_to_the_same(run, "trainer")
    assert_same_steps(synchronous.run, run)
    (aside,) = run.events("quarantined")
    assert aside["detail"].startswith(f"checkpoint of step {damaged.step}: ")
    assert (run.root / "quarantine" / damaged.folder.name).is_dir()
    kept = {one.step for one in checkpoints_of(run.root)}
    assert kept == {2, 4, 6} - {damaged.step}


def test_a_run_whose_processes_take_turns_on_their_devices_is_the_one_in_which_they_do_not(
    synchronous: Finished, colocated: Finished
) -> None:
    alone, run = synchronous.run, colocated.run
    assert colocated.status == 0, run.stderr
    assert_same_steps(alone, run)
    assert sorted(alone.traces(), key=trace_id) == sorted(run.traces(), key=trace_id)
    assert alone.objects("evaluations.jsonl") == run.objects("evaluations.jsonl")


def test_processes_that_die_as_the_turn_changes_are_replaced_in_the_right_turn(
    colocated_killed: Finished,
) -> None:
    run = colocated_killed.run
    assert colocated_killed.status == 0, run.stderr
    assert [event["actor"] for event in run.events("actor_died")] == ["trainer", "generator-0"]
    assert run.summary()["restarts"] == 2
    assert [step["step"] for step in run.objects("metrics.jsonl")] == list(range(1, STEPS + 1))
    ids = [trace.trace_id for trace in run.traces()]
    assert len(ids) == len(set(ids))


def test_sigterm_ends_a_run_cleanly_with_its_finished_work_on_disk(
    controller_killed: Resumed,
) -> None:
    stopped = controller_killed.stopped
    assert stopped.status == 128 + signal.SIGTERM
    assert stopped.seen["stderr"] == ""
    assert len(stopped.seen["events"]) == 1
    check_steps_are_on_disk(stopped.seen["steps"], stopped.seen["traces"], stopped.seen["summary"])


def test_a_run_that_was_stopped_and_killed_with_all_its_processes_is_the_undisturbed_run(
    synchronous: Finished, controller_killed: Resumed
) -> None:
    alone, run = synchronous.run, controller_killed.run
    assert controller_killed.status == 0, run.stderr
    assert len(run.events("run_resumed")) == 2
    (change,) = run.events("config_changed")
    assert "supervision.trainer_restarts: 3 -> 4" in change["detail"]
    assert_same_steps(alone, run)
    assert sorted(alone.traces(), key=trace_id) == sorted(run.traces(), key=trace_id)
    assert alone.objects("evaluations.jsonl") == run.objects("evaluations.jsonl")
    assert not run.events("quarantined")
