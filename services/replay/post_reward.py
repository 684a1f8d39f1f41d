"""Posts a reward to a run from another process, while the run is running or stopped.

The run applies it in `late_rewards`. Does not import torch, because it is a CLI command.
"""

import math
import time
from contextlib import closing
from pathlib import Path

from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.configs.load import load_config
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.store.rows import StoreMissing, Where
from composer_mesh.services.store.schema import KIND


class LateRewardError(Exception):
    """A reward cannot be posted; the message says why, and what to do instead."""


def post_reward(run: Path, trace_id: str, reward: float, source: str = "") -> None:
    """Post a reward for a rollout of a run; raises LateRewardError where the run takes none.

    Durable when it returns; the run reads it before its next step. The last one for a rollout wins.
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
    if not _stored(run, trace_id):
        raise LateRewardError(
            f"{run} has no rollout {trace_id!r}: take a trace_id that composer-mesh traces {run} "
            "lists"
        )
    with closing(SqliteFile(run / STORE_FILE, KIND)) as file, file.transaction() as rows:
        rows.execute(
            "INSERT INTO rewards (trace_id, reward, source, posted) VALUES (?, ?, ?, ?)",
            (trace_id, reward, source, time.time()),
        )


def _stored(run: Path, trace_id: str) -> bool:
    # Imported here because it loads NumPy, which no other command should wait for.
    from composer_mesh.services.store.reading import RunReader

    try:
        with RunReader(run) as reader:
            return any(reader.rows(Where(trace_id=trace_id)))
    except StoreMissing as error:
        raise LateRewardError(str(error)) from None
