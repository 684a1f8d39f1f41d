"""Two whole runs with the same seed and several replicas, which repeat."""

from __future__ import annotations

import json
from pathlib import Path

from live_run import launched, untimed


def test_synchronous_runs_of_several_replicas_repeat(tmp_path: Path) -> None:
    """With the groups that they drop; the first makes the warm start, the second finds it.

    The second has another number of rollout workers, and an interpreter that hashes otherwise.
    """
    settings = {
        "run.steps": 2,
        "schedule.max_lag": 0,
        "schedule.dynamic_sampling": "true",
        "generator.replicas": 2,
        "environment.replicas": 2,
        "rollouts.workers": 1,
    }
    twice, traces = [], []
    for name in ("first", "second"):
        cache, other = tmp_path / "policies", name == "second"
        settings["rollouts.workers"] = 3 if other else 1
        with launched(tmp_path / name, cache, settings, as_installed=other) as run:
            assert run.wait() == 0, run.stderr
        assert {"generator-0", "generator-1"} <= run.pids().keys()
        twice.append([untimed(step) for step in run.objects("metrics.jsonl")])
        traces.append(run.traces())
    assert json.dumps(twice[0]) == json.dumps(twice[1])
    assert traces[0] == traces[1]
    assert [step["lag/max"] for step in twice[0]] == [0, 0]
    assert sum(step["rollouts/dropped_groups"] for step in twice[0]) > 0
