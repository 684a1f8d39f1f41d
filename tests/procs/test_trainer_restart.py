"""A trainer that is killed while it trains: the run goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live_run import GONE_DEADLINE_S, LiveRun, launched, wait_until

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
    return {key: value for key, value in step.items() if not key.startswith("time/")}


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


def test_a_run_whose_controller_was_killed_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, policy_cache: Path
) -> None:
    """With the replay channel off, whose memory of what is novel does not come back."""
    settings = {**SETTINGS, "replay.beta": 0}
    with launched(tmp_path / "alone", policy_cache, settings) as alone:
        assert alone.wait() == 0, alone.stderr
    with launched(tmp_path / "killed", policy_cache, settings) as killed:
        after_steps(killed, 3)
        killed.process.kill()
        wait_until(lambda: not killed.living(), "end of the last process", GONE_DEADLINE_S)
    options = ("--resume",)
    with launched(tmp_path / "killed", policy_cache, settings, options=options) as run:
        assert run.wait() == 0, run.stderr
    (resumed,) = run.events("run_resumed")
    assert resumed["detail"].endswith(("step-2", "step-4"))
    steps = [[untimed(step) for step in one.objects("metrics.jsonl")] for one in (alone, run)]
    assert json.dumps(steps[0]) == json.dumps(steps[1])
    assert sorted(alone.lines("traces/traces.jsonl")) == sorted(run.lines("traces/traces.jsonl"))
    assert alone.objects("evaluations.jsonl") == run.objects("evaluations.jsonl")
    assert run.objects("metrics.jsonl.superseded-1")[0]["step"] >= 3
