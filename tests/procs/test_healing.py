"""A shortened run whose processes are killed and stopped: it goes on, and says what was done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from live_run import SHORT, LiveRun, launched

from composer_mesh.mesh.processes import is_alive

pytestmark = pytest.mark.timeout(600)

QUICK = {
    **SHORT,
    "run.steps": 30,
    "generator.replicas": 2,
    "environment.replicas": 2,
    "rollouts.workers": 2,
    "supervision.heartbeat_s": 0.5,
    "supervision.hang_s": 4.0,
    "supervision.backoff_s": 0.1,
}
KILLED = ("generator-0", "environment-1", "rollouts-0")
HUNG = ("generator-1", "environment-0", "rollouts-1")


def steps(run: LiveRun) -> int:
    return len(run.lines("metrics.jsonl"))


def strike(run: LiveRun, actor: str, number: signal.Signals) -> int:
    """Send a signal to an actor's process, once it serves; returns its id."""
    pid = run.until(lambda run: run.pids().get(actor), f"process of {actor}")
    os.kill(pid, number)
    return pid


def restarted(actor: str) -> Callable[[LiveRun], bool]:
    """Whether an actor serves in the place of a dead one."""
    return lambda run: actor in {event["actor"] for event in run.events("actor_restarted")}


def test_a_run_outlives_the_loss_of_all_its_replicas_at_once(
    tmp_path: Path, policy_cache: Path
) -> None:
    with launched(tmp_path / "run", policy_cache, QUICK) as run:
        run.until_training()
        stopped = [strike(run, name, signal.SIGSTOP) for name in HUNG]
        killed = [strike(run, name, signal.SIGKILL) for name in KILLED]
        for name in (*KILLED, *HUNG):
            run.until(restarted(f"{name}.2"), f"replacement of {name}")
        assert not any(map(is_alive, [*killed, *stopped]))
        assert run.wait() == 0, run.stderr
    died = [event["actor"] for event in run.events("actor_died")]
    assert sorted(died) == sorted([*KILLED, *HUNG])
    assert sorted(event["actor"] for event in run.events("actor_hung")) == sorted(HUNG)
    assert run.summary()["restarts"] == len(died)
    assert steps(run) == QUICK["run.steps"]
    ids = [trace.trace_id for trace in run.traces()]
    assert len(ids) == len(set(ids))
