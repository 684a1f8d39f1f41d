"""How a run ends before its time: by a dead actor, or by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from finished_work import check_that_finished_work_is_on_disk
from live_run import (
    END_DEADLINE_S,
    ENDLESS,
    LiveRun,
    composer_mesh,
    launched,
)

from composer_mesh.services.directory.status import read_status

pytestmark = pytest.mark.timeout(600)

KINDS = {"trainer", "generator", "sdpo_teacher", "teacher_replay"}


@pytest.mark.parametrize("actor", ["generator-0", "trainer"])
def test_without_restarts_a_killed_actor_ends_the_run_naming_it(
    actor: str, tmp_path: Path, policy_cache: Path
) -> None:
    never = {"supervision.restarts": 0, "supervision.trainer_restarts": 0}
    with launched(tmp_path / "run", policy_cache, ENDLESS | never) as run:
        run.until_training()
        os.kill(run.pids()[actor], signal.SIGKILL)
        assert run.wait(END_DEADLINE_S) == 1
    assert run.stderr.startswith(f"composer-mesh: {actor} died: ")
    assert run.stderr.count("\n") == 1
    assert [event["actor"] for event in run.events("actor_died")] == [actor]
    assert [actor in event["detail"] for event in run.events("run_failed")] == [True]
    check_that_finished_work_is_on_disk(run)


@dataclass(frozen=True)
class Watched:
    """A run that `tree` looked at while it trained, that got a late reward and Ctrl-C ended."""

    run: LiveRun
    as_json: str
    as_text: str
    newest: int
    posted: subprocess.CompletedProcess[str]
    refused: subprocess.CompletedProcess[str]
    status: int


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> Watched:
    root = tmp_path_factory.mktemp("watched") / "run"
    with launched(root, policy_cache, ENDLESS | {"late_rewards.max_age": 900}) as run:
        run.until_training()
        run.until(tells_of_a_step, "status of the first step")  # it is written every 2 s
        trees = [composer_mesh("tree", str(root), *how) for how in ([], ["--json"])]
        newest = run.objects("metrics.jsonl")[-1]["policy_version"]
        first = min(trace.trace_id for trace in run.traces())
        posted = composer_mesh("reward", str(root), first, "0.123", "--source", "a test")
        refused = composer_mesh("reward", str(root), "train-nobody", "1")
        run.until(steps_with_late_rewards, "late reward in a step")
        run.signal_group(signal.SIGINT)
        status = run.wait(END_DEADLINE_S)
    assert [tree.returncode for tree in trees] == [0, 0]
    return Watched(run, trees[1].stdout, trees[0].stdout, newest, posted, refused, status)


def tells_of_a_step(run: LiveRun) -> bool:
    status = read_status(run.root)
    return status is not None and status.step >= 1


def steps_with_late_rewards(run: LiveRun) -> list[dict[str, Any]]:
    return [step for step in run.objects("metrics.jsonl") if step["late/rewards"]]


def test_tree_shows_the_four_kinds_while_it_runs(watched: Watched) -> None:
    about = json.loads(watched.as_json)
    assert (about["state"], about["mesh"], about["missing"]) == ("running", True, [])
    assert about["step"] >= 1
    processes = [process for host in about["hosts"] for process in host["processes"]]
    actors = {actor["name"]: actor for process in processes for actor in process["actors"]}
    assert {actor["kind"] for actor in actors.values()} >= KINDS
    assert {name: actor["pid"] for name, actor in actors.items()} == watched.run.pids()
    assert {actor["state"] for actor in actors.values()} <= {"ready", "busy"}
    for name in ("trainer", "generator-0", "sdpo_teacher"):
        # The run's own version is read first, and steps go on while its actors are asked.
        served = actors[name]["policy_version"]
        assert about["policy_version"] - 1 <= served <= watched.newest + 1
    assert all(name in watched.as_text for name in actors)


def test_ctrl_c_ends_cleanly(watched: Watched) -> None:
    assert watched.status == 128 + signal.SIGINT
    assert watched.run.stderr == ""
    assert "Traceback" not in watched.run.stdout
    assert len(watched.run.events("run_stopped")) == 1
    assert watched.run.events("actor_died") == []
    check_that_finished_work_is_on_disk(watched.run)


def test_a_late_reward_reaches_a_run_that_goes_on(watched: Watched) -> None:
    assert (watched.posted.returncode, watched.posted.stderr) == (0, "")
    assert watched.refused.returncode == 2
    assert "has no rollout 'train-nobody'" in watched.refused.stderr
    (step,) = steps_with_late_rewards(watched.run)
    assert step["late/samples"] > 0


def test_tree_says_that_an_ended_run_is_not_there(watched: Watched) -> None:
    tree = composer_mesh("tree", str(watched.run.root))
    assert (tree.returncode, tree.stdout) == (1, "")
    assert str(watched.run.root) in tree.stderr
    assert tree.stderr.count("\n") == 1


MOMENTS: dict[str, Callable[[LiveRun], object]] = {
    "first process of the mesh": lambda run: len(run.living()) > 1,
    "word of the end": lambda run: "stopping actors" in run.stdout,
    "last event": lambda run: run.events("run_stopped"),
    "summary": lambda run: (run.root / "summary.json").exists(),
    "reward curve": lambda run: (run.root / "reward.png").exists(),
}


def test_ctrl_c_from_the_start_of_the_mesh_to_the_last_line_ends_cleanly(
    tmp_path: Path, policy_cache: Path
) -> None:
    with launched(tmp_path / "run", policy_cache, ENDLESS) as run:
        for what, moment in MOMENTS.items():
            run.until(moment, what)
            run.signal_group(signal.SIGINT)
        assert run.wait(END_DEADLINE_S) == 128 + signal.SIGINT
    assert run.stderr == ""
    assert run.summary()["steps"] == 0
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "a resume goes on from the beginning" in run.stdout
    assert len(run.events("run_stopped")) == 1


def test_ctrl_c_before_anything_started_ends_cleanly(tmp_path: Path, policy_cache: Path) -> None:
    with launched(tmp_path / "run", policy_cache, ENDLESS) as run:
        run.until(lambda run: (run.root / ".lock").exists(), "claim of the run directory")
        run.signal_group(signal.SIGINT)
        assert run.wait(END_DEADLINE_S) == 128 + signal.SIGINT
    assert run.stderr == ""
