"""Posting a reward to a run from outside of it, while it goes on or while it rests.

What the run makes of it is `late_rewards`. Loads no torch: it is a command of its own.
"""

import json
import math
from contextlib import closing
from pathlib import Path

from composer_mesh.configs.load import load_config
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore


class LateRewardError(Exception):
    """A reward that cannot be posted: why, and what to do instead."""


def post_reward(run: Path, trace_id: str, reward: float, source: str = "") -> None:
    """Post a reward for a rollout of a run; raises LateRewardError where the run takes none.

    Durable when it returns; the run reads it before its next step.
    """
    if not math.isfinite(reward):
        raise LateRewardError(f"the reward is {reward} but must be finite: post a number")
    config = run / "config.toml"
    if not config.is_file():
        raise LateRewardError(f"{run} is no run directory: it has no config.toml")
    if not load_config(config, []).late_rewards.on:
        raise LateRewardError(
            f"{run} takes no late rewards, late_rewards.max_age is 0: start the run with the steps "
            "that a rollout may wait for its reward"
        )
    if not _stored(run / "traces" / "traces.jsonl", trace_id):
        raise LateRewardError(
            f"{run} has no rollout {trace_id!r}: take a trace_id of its traces/traces.jsonl"
        )
    with closing(LateStore(run / LATE_FILE)) as store:
        store.post_reward(trace_id, reward, source)


def _stored(file: Path, trace_id: str) -> bool:
    if not file.is_file():
        return False
    mark = json.dumps(trace_id)
    with file.open() as lines:
        return any(mark in line and json.loads(line)["trace_id"] == trace_id for line in lines)
