"""Posts a reward to a run from another process, while the run is running or stopped.

The run applies it in `late_rewards`. Does not import torch, because it is a CLI command.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.configs.load import load_config
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.untrusted_json import MIB, short_reason
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.store.rows import StoreMissing
from composer_mesh.services.store.schema import KIND

LONGEST_FILE = 256 * MIB


@dataclass(frozen=True)
class Post:
    """A line of a file of rewards."""

    trace_id: str
    reward: Annotated[float, Field(allow_inf_nan=False)]


POST = fail_fast(Post)


class LateRewardError(Exception):
    """A reward cannot be posted; the message says why, and what to do instead."""


def post_reward(run: Path, trace_id: str, reward: float, source: str = "") -> None:
    """Post a reward for a rollout of a run, as `post_rewards` does."""
    post_rewards(run, {trace_id: reward}, source)


def read_posts(file: Path) -> dict[str, float]:
    """Read a file of JSON lines with a `trace_id` and a `reward`; raises LateRewardError."""
    try:
        lines = read_regular(file, LONGEST_FILE).splitlines()
    except OSError as error:
        raise LateRewardError(f"{file} cannot be read ({error.strerror}): correct it") from None
    posts = [_post(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    return {one.trace_id: one.reward for one in posts}


def _post(line: bytes, where: str) -> Post:
    try:
        return POST.validate_json(line)
    except ValueError as error:
        raise LateRewardError(
            f"{where} is no post ({short_reason(error)}): write UTF-8 lines like "
            '{"trace_id": "train-000000-000", "reward": 0.5}'
        ) from None


def post_rewards(run: Path, rewards: Mapping[str, float], source: str = "") -> None:
    """Post rewards by trace_id: all of them, or none where LateRewardError is raised.

    Durable when it returns; the run reads them before its next step. The last one for a rollout
    wins.
    """
    for reward in rewards.values():
        if not math.isfinite(reward):
            raise LateRewardError(f"the reward is {reward} but must be finite: post a number")
    check_takes_rewards(run)
    if unknown := unknown_rollouts(run, rewards):
        raise LateRewardError(
            f"{run} has no rollout {unknown[0]!r}: take a trace_id that composer-mesh traces {run} "
            "lists"
        )
    insert_rewards(run, rewards.items(), source)


def insert_rewards(run: Path, rewards: Iterable[tuple[str, float]], source: str) -> None:
    """Post finite rewards for stored rollouts, in order: all of them, or none."""
    posted = time.time()
    with closing(SqliteFile(run / STORE_FILE, KIND)) as file, file.transaction() as rows:
        rows.executemany(
            "INSERT INTO rewards (trace_id, reward, source, posted) VALUES (?, ?, ?, ?)",
            [(trace_id, reward, source, posted) for trace_id, reward in rewards],
        )


def check_takes_rewards(run: Path) -> None:
    """Raise LateRewardError unless a directory is that of a run that takes late rewards."""
    config = run / "config.toml"
    if not config.is_file():
        raise LateRewardError(f"{run} is no run directory: it has no config.toml")
    if not load_config(config, []).late_rewards.on:
        raise LateRewardError(
            f"{run} takes no late rewards, late_rewards.max_age is 0: start the run with the steps "
            "that a rollout may wait for its reward"
        )


def unknown_rollouts(run: Path, trace_ids: Iterable[str]) -> list[str]:
    """Return those trace_ids that are not stored in a run."""
    # Imported here because it loads NumPy, which no other command should wait for.
    from composer_mesh.services.store.reading import RunReader

    try:
        with RunReader(run) as reader:
            stored = reader.stored(names := list(trace_ids))
    except StoreMissing as error:
        raise LateRewardError(str(error)) from None
    return [one for one in names if one not in stored]


def posted_by(run: Path, source: str) -> Counter[str]:
    """Return how many rewards a source has posted for each rollout."""
    return Counter(trace_id for trace_id, _ in _posts_of(run, source))


def last_posted(run: Path, source: str) -> dict[str, float]:
    """Return the last reward that a source has posted for each rollout."""
    return dict(_posts_of(run, source))


def _posts_of(run: Path, source: str) -> list[tuple[str, float]]:
    from composer_mesh.services.store.reading import RunReader

    try:
        with RunReader(run) as reader:
            rewards = reader.rewards(state=None)
    except StoreMissing as error:
        raise LateRewardError(str(error)) from None
    return [(one.trace_id, one.reward) for one in rewards if one.source == source]
