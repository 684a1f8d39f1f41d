"""A run that is looked at, gets a late reward and ends by Ctrl-C; and one that a death ends."""

from __future__ import annotations

import json
import signal

from finished_work import check_that_finished_work_is_on_disk
from live_run import composer_mesh
from shared_runs import Finished, Watched, steps_with_late_rewards

KINDS = {"trainer", "generator", "sdpo_teacher", "teacher_replay"}


def test_tree_shows_the_four_kinds_while_it_runs(interrupted: Watched) -> None:
    assert (interrupted.as_json.returncode, interrupted.as_text.returncode) == (0, 0)
    about = json.loads(interrupted.as_json.stdout)
    assert (about["state"], about["mesh"], about["missing"]) == ("running", True, [])
    assert about["step"] >= 1
    processes = [process for host in about["hosts"] for process in host["processes"]]
    actors = {actor["name"]: actor for process in processes for actor in process["actors"]}
    assert {actor["kind"] for actor in actors.values()} >= KINDS
    assert {name: actor["pid"] for name, actor in actors.items()} == interrupted.run.pids()
    assert {actor["state"] for actor in actors.values()} <= {"ready", "busy"}
    for name in ("trainer", "generator-0", "sdpo_teacher"):
        # The run's own version is read first, and steps go on while its actors are asked.
        served = actors[name]["policy_version"]
        assert about["policy_version"] - 1 <= served <= interrupted.newest + 1
    assert all(name in interrupted.as_text.stdout for name in actors)


def test_ctrl_c_ends_cleanly(interrupted: Watched) -> None:
    assert interrupted.status == 128 + signal.SIGINT
    assert interrupted.run.stderr == ""
    assert "Traceback" not in interrupted.run.stdout
    assert len(interrupted.run.events("run_stopped")) == 1
    assert interrupted.run.events("actor_died") == []
    check_that_finished_work_is_on_disk(interrupted.run)


def test_a_late_reward_reaches_a_run_that_goes_on(interrupted: Watched) -> None:
    assert (interrupted.posted.returncode, interrupted.posted.stderr) == (0, "")
    assert interrupted.refused.returncode == 2
    assert "has no rollout 'train-nobody'" in interrupted.refused.stderr
    (step,) = steps_with_late_rewards(interrupted.run)
    assert step["late/samples"] > 0


def test_tree_says_that_an_ended_run_is_not_there(interrupted: Watched) -> None:
    tree = composer_mesh("tree", str(interrupted.run.root))
    assert tree.returncode == 1
    assert "this is what the run itself reported last" in tree.stdout
    assert "--resume" in tree.stderr
    assert str(interrupted.run.root) in tree.stderr
    assert tree.stderr.count("\n") <= 3


def test_without_restarts_a_killed_actor_ends_the_run_naming_it(unsupervised: Finished) -> None:
    run = unsupervised.run
    assert unsupervised.status == 1
    assert run.stderr.startswith("composer-mesh: generator-0 died: ")
    assert run.stderr.count("\n") == 1
    assert [event["actor"] for event in run.events("actor_died")] == ["generator-0"]
    assert ["generator-0" in event["detail"] for event in run.events("run_failed")] == [True]
    check_that_finished_work_is_on_disk(run)
