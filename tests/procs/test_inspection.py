"""A run that trains, looked into and scaled from other processes with the commands of a user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_run import (
    ENDLESS,
    LiveRun,
    can_read_stacks,
    composer_mesh,
    launched,
    tree_of,
    wait_until,
)

STOPPED_DEADLINE_S = 60.0


def printed(*arguments: str) -> list[dict[str, Any]]:
    """What a command prints, one object each line."""
    done = composer_mesh(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tree(run: LiveRun) -> dict[str, dict[str, Any]]:
    """The processes that the mesh lists, by name."""
    done = tree_of(run.root)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    return {one["name"]: one for host in about["hosts"] for one in host["processes"]}


def check_tree(run: LiveRun) -> None:
    processes = tree(run)
    assert {"controller", "trainer", "generator-0", "environment-0"} <= set(processes)
    for name, process in processes.items():
        assert process["pid"] in run.living(), name
        assert process["rss_bytes"] > 1 << 20, name
        assert process["cpu_percent"] is not None, name
    wait_until(lambda: _policy_version(run) >= 1, "first pull in the tree", STOPPED_DEADLINE_S)


def _policy_version(run: LiveRun) -> int:
    """That of the generator; the controller writes it down now and then, not with every step."""
    version: int = tree(run)["generator-0"]["actors"][0]["policy_version"]
    return version


def check_stacks(run: LiveRun) -> None:
    """A process that is stopped is read like the others, and the run goes on when it does."""
    stopped = run.pids()["generator-0"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        stacks = {one["process"]: one for one in printed("stacks", str(run.root))}
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert {"controller", "trainer", "generator-0"} <= set(stacks)
    assert {name: one["error"] for name, one in stacks.items() if not one["threads"]} == {}
    step = len(run.lines("metrics.jsonl"))
    run.until(lambda run: len(run.lines("metrics.jsonl")) > step + 1, "steps after the stacks")


def check_stacks_or_why_not(run: LiveRun) -> None:
    if can_read_stacks():
        check_stacks(run)
        return
    done = composer_mesh("stacks", str(run.root))
    assert "controller  pid" in done.stdout
    assert "Traceback" not in done.stderr


def check_query(run: LiveRun) -> None:
    sql = "SELECT full_name FROM actors WHERE full_name LIKE 'trainer%'"
    assert printed("query", str(run.root), sql)


def check_scale(run: LiveRun) -> None:
    done = composer_mesh("scale", str(run.root), "generator=2", "environment=2", "rollouts=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"generator-1", "environment-1", "rollouts-1"} <= set(tree(run))
    resized = {event["actor"] for event in run.events("pool_resized")}
    assert resized == {"generator", "environment", "rollouts"}
    step = len(run.lines("metrics.jsonl"))
    run.until(lambda run: len(run.lines("metrics.jsonl")) > step + 1, "steps after the growth")
    done = composer_mesh("scale", str(run.root), "generator=1", "rollouts=1")
    assert (done.returncode, done.stdout) == (0, "generator: 2 -> 1\nrollouts: 2 -> 1\n")
    step = len(run.lines("metrics.jsonl"))
    run.until(lambda run: len(run.lines("metrics.jsonl")) > step + 1, "steps after the shrinking")


def check_refusals(run: LiveRun) -> None:
    done = composer_mesh("scale", str(run.root), "trainer=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "set trainer.ranks" in done.stderr


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> Any:
    """A run that trains without an end and keeps telemetry, and a reader of its events."""
    root = tmp_path_factory.mktemp("looking") / "run"
    with launched(root, policy_cache, ENDLESS | {"run.telemetry": "true"}) as run:
        run.until(lambda run: run.lines("events.jsonl"), "first event")
        command = [sys.executable, "-m", "composer_mesh", "events", str(root), "--follow"]
        following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        run.until_training()
        yield run, following
        following.kill()
        following.communicate()


@pytest.mark.plugins
def test_a_run_can_be_looked_into_and_scaled_and_leaves_nothing_when_it_is_killed(
    followed: tuple[LiveRun, subprocess.Popen[str]],
) -> None:
    run, following = followed
    place = str(run.root)
    told = [line for line in run.stdout.splitlines() if "look_into_it" in line]
    assert [f"composer-mesh {name} {place}" in told[0] for name in ("tree", "events", "tui")] == [
        True
    ] * 3
    check_tree(run)
    check_stacks_or_why_not(run)
    check_query(run)
    check_refusals(run)
    check_scale(run)

    run.process.send_signal(signal.SIGKILL)
    out, _ = following.communicate(timeout=STOPPED_DEADLINE_S)
    assert following.returncode == 0
    assert [kind for kind in ("run_started", "pool_resized") if kind in out] == [
        "run_started",
        "pool_resized",
    ]
    run.process.wait()
    wait_until(lambda: not run.living(), "end of every process", STOPPED_DEADLINE_S)
    done = composer_mesh("tree", place)
    assert done.returncode == 1
    assert "this is what the run itself reported last" in done.stdout
    assert "it was killed" in done.stderr
