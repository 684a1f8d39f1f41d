"""Posts rewards to a run from another process, while the run is running or stopped.

They are those of a call, of a file, or those that another program appends to a file.

The run applies it in `late_rewards`. Does not import torch, because it is a CLI command.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
from composer_mesh.services.directory.status import goes_on
from composer_mesh.services.inspection.events_command import FollowedLines
from composer_mesh.services.inspection.page import plain_text
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
            f"{where} is not a post ({short_reason(error)}): write UTF-8 lines like "
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
        raise LateRewardError(f"{run} is not a run directory: it has no config.toml")
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


POLL_S = 1.0
MOST_WAITING = 100_000
"""Rewards that wait for rollouts which the run has not stored yet; the oldest go first."""


class RewardQueue:
    """The rewards of a file: those of stored rollouts are posted, others wait for theirs.

    A file only grows, so as many of its posts for a rollout as the run has from this source are
    already there: following it again posts none of them twice.
    """

    def __init__(self, run: Path, source: str, report: Callable[[str], object]) -> None:
        self._run, self._source, self._report = run, source, report
        self._lines, self._posted = 0, posted_by(run, source)
        self.waiting: dict[str, list[float]] = {}
        """Rewards by trace_id that are not posted yet, in order of arrival."""

    def take(self, lines: Iterable[str]) -> None:
        """Read lines; one that is no post is reported and left out."""
        for line in lines:
            self._lines += 1
            try:
                post = POST.validate_json(line)
            except ValueError as error:
                reason = plain_text(short_reason(error))
                self._report(f"line {self._lines} is not a post and left out: {reason}")
                continue
            if self._posted[post.trace_id]:
                self._posted[post.trace_id] -= 1
            else:
                self.waiting.setdefault(post.trace_id, []).append(post.reward)
        while len(self.waiting) > MOST_WAITING:
            lost = next(iter(self.waiting))
            del self.waiting[lost]
            self._report(
                f"more than {MOST_WAITING:,} rollouts are waited for: {lost!r} is left out"
            )

    def post(self) -> None:
        """Post the rewards of all rollouts that the run has stored."""
        unknown = set(unknown_rollouts(self._run, self.waiting))
        known = [
            (name, reward)
            for name, rewards in self.waiting.items()
            if name not in unknown
            for reward in rewards
        ]
        if known:
            insert_rewards(self._run, known, self._source)
        self.waiting = {name: self.waiting[name] for name in self.waiting if name in unknown}


def follow_rewards(
    run: Path,
    file: Path,
    source: str,
    *,
    more: Callable[[], bool] | None = None,
    wait: Callable[[], None] = lambda: time.sleep(POLL_S),
    report: Callable[[str], object] = lambda said: sys.stderr.write(f"composer-mesh: {said}\n"),
) -> int:
    """Post what is in a file and what is added to it until the run ends; return the exit status.

    It is 1 where rewards are left for rollouts that the run never stored. Without a `source` the
    file's name is the source. Raises LateRewardError where the run takes no late rewards.
    """
    check_takes_rewards(run)
    queue, lines = RewardQueue(run, source or f"file {file.name}", report), FollowedLines(file)

    def look() -> None:
        queue.take(lines.new())
        queue.post()

    until_ended(run, look, more, wait)
    if queue.waiting:
        name = next(iter(queue.waiting))
        report(f"{len(queue.waiting):,} rewards are for rollouts that {run} has not, as {name!r}")
    return int(bool(queue.waiting))


def until_ended(
    run: Path,
    look: Callable[[], None],
    more: Callable[[], bool] | None,
    wait: Callable[[], None],
) -> None:
    """Look for rewards again and again until a run has ended, or there is no `more`."""
    goes_further = more or (lambda: goes_on(run))
    while True:
        again = goes_further()  # checked first, so that the last rewards are not missed
        look()
        if not again:
            return
        wait()
