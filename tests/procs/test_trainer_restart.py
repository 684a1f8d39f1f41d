"""A trainer, or a whole run, that is killed: the run goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live_run import GONE_DEADLINE_S, LiveRun, launched, wait_until

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


def untimed(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if not key.startswith(("time/", "store/"))}


def after_steps(run: LiveRun, count: int) -> None:
    run.until(lambda run: len(run.lines("metrics.jsonl")) >= count, f"step {count}")


@pytest.mark.parametrize(("ranks", "victim"), [(1, "trainer"), (2, "trainer-1")])
def test_a_run_whose_trainer_is_killed_trains_the_same_steps_as_one_left_alone(
    tmp_path: Path, policy_cache: Path, ranks: int, victim: str
) -> None:
    settings = {**SETTINGS, "trainer.ranks": ranks}
    with launched(tmp_path / "alone", policy_cache, settings) as alone:
        assert alone.wait() == 0, alone.stderr
    with launched(tmp_path / "killed", policy_cache, settings) as run:
        after_steps(run, 3)
        os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.stderr
    (died,) = run.events("actor_died")
    assert died["actor"] == victim
    (restarted,) = run.events("trainer_restarted")
    assert f"{victim} died: " in restarted["detail"]
    assert "to the same losses and gradients" in restarted["detail"]
    assert run.summary()["restarts"] == 1
    assert run.stderr == ""
    steps = [[untimed(step) for step in one.objects("metrics.jsonl")] for one in (alone, run)]
    assert json.dumps(steps[0]) == json.dumps(steps[1])
    kept = sorted(path.name for path in (run.root / "checkpoints").iterdir())
    assert kept == ["step-2", "step-4", "step-6"]


def test_a_run_that_is_stopped_and_killed_and_goes_on_is_the_undisturbed_run(
    tmp_path: Path, policy_cache: Path
) -> None:
    """All three channels are on. Once it is asked to stop, and once every process is killed."""
    with launched(tmp_path / "alone", policy_cache, SETTINGS) as alone:
        assert alone.wait() == 0, alone.stderr
    with launched(tmp_path / "stopped", policy_cache, SETTINGS) as stopped:
        after_steps(stopped, 1)
        stopped.process.terminate()
        assert stopped.wait() == 128 + signal.SIGTERM
    options = ("--resume",)
    with launched(tmp_path / "stopped", policy_cache, SETTINGS, options=options) as killed:
        after_steps(killed, 3)
        killed.signal_group(signal.SIGKILL)
        killed.process.wait()
        wait_until(lambda: not killed.living(), "end of the last process", GONE_DEADLINE_S)
    changed = {**SETTINGS, "supervision.trainer_restarts": 4}
    with launched(tmp_path / "stopped", policy_cache, changed, options=options) as run:
        assert run.wait() == 0, run.stderr
    assert len(run.events("run_resumed")) == 2
    (change,) = run.events("config_changed")
    assert "supervision.trainer_restarts: 3 -> 4" in change["detail"]
    steps = [[untimed(step) for step in one.objects("metrics.jsonl")] for one in (alone, run)]
    assert json.dumps(steps[0]) == json.dumps(steps[1])
    assert sorted(alone.traces(), key=trace_id) == sorted(run.traces(), key=trace_id)
    assert alone.objects("evaluations.jsonl") == run.objects("evaluations.jsonl")
    assert not run.events("quarantined")


def trace_id(trace: Trace) -> str:
    return trace.trace_id
