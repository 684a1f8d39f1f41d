"""What holds for each of the shared runs, whatever was killed in it."""

from __future__ import annotations

from typing import Any

import pytest
from live_run import LiveRun, composer_mesh

from composer_mesh.configs.load import load_config

ENDED = (
    *("asynchronous", "synchronous", "trainer_killed", "controller_killed", "interrupted"),
    *("replicas_killed", "teacher_killed", "replay_lost", "late_replay", "paid_replay"),
    *("colocated_killed", "carried"),
)
"""Runs that have ended by themselves or by a signal to them."""


@pytest.fixture(params=ENDED)
def run(request: pytest.FixtureRequest) -> LiveRun:
    made: Any = request.getfixturevalue(request.param)
    return made.run


def test_no_trained_token_of_a_run_is_older_than_max_lag(run: LiveRun) -> None:
    schedule = load_config(run.root / "config.toml", []).schedule
    bound = schedule.max_token_age or schedule.max_lag
    steps = run.objects("metrics.jsonl")
    assert steps
    assert max(step["lag/max"] for step in steps) <= bound


def test_a_run_trains_each_step_once_and_in_order(run: LiveRun) -> None:
    steps = [step["step"] for step in run.objects("metrics.jsonl")]
    assert steps == list(range(1, run.summary()["steps"] + 1))


def test_the_files_of_a_run_are_whole_and_its_owners_alone(run: LiveRun) -> None:
    done = composer_mesh("verify", str(run.root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path for path in run.root.rglob("*") if path.stat().st_mode & 0o077] == []
