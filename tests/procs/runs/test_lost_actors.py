"""Runs whose actors are killed or stopped: they go on, and say what was done."""

from __future__ import annotations

import signal

from shared_runs import HUNG, KILLED, REPLICAS, Finished, steps, with_and_without
from teacher_replaced import check_that_one_teacher_was_replaced

from composer_mesh.mesh.processes import is_alive


def test_a_run_outlives_the_loss_of_all_its_replicas_at_once(replicas_killed: Finished) -> None:
    run = replicas_killed.run
    assert replicas_killed.status == 0, run.stderr
    assert not any(map(is_alive, replicas_killed.seen["struck"]))
    died = [event["actor"] for event in run.events("actor_died")]
    assert sorted(died) == sorted([*KILLED, *HUNG])
    assert sorted(event["actor"] for event in run.events("actor_hung")) == sorted(HUNG)
    assert run.summary()["restarts"] == len(died)
    assert steps(run) == REPLICAS["run.steps"]
    ids = [trace.trace_id for trace in run.traces()]
    assert len(ids) == len(set(ids))


def test_with_skip_a_run_goes_on_without_a_killed_teacher_and_has_it_back(
    teacher_killed: Finished,
) -> None:
    run = teacher_killed.run
    assert teacher_killed.status == 128 + signal.SIGINT
    assert run.stderr == ""
    lost = [int(event["detail"].split(":")[0].split()[1]) for event in run.events("sdpo_lost")]
    taught, untaught = with_and_without(run)
    assert untaught
    assert set(untaught) <= set(lost)
    assert taught[0] < untaught[0] <= untaught[-1] < taught[-1]  # one step or several
    check_that_one_teacher_was_replaced(run)


def test_a_lost_replica_costs_no_state_and_the_run_goes_on(replay_lost: Finished) -> None:
    run = replay_lost.run
    assert replay_lost.status == 0, run.stderr
    assert [event["actor"] for event in run.events("actor_died")] == ["teacher_replay-0"]
    replay = run.summary()["replay"]
    assert replay["failed"] == {}
    assert sum(replay["outcomes"].values()) >= replay["states"] > 0
