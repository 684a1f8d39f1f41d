"""What a run whose trainer was killed has to have in common with one that was left alone."""

from __future__ import annotations

import json

from live_run import LiveRun, untimed


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
