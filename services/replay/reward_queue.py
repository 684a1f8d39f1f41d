"""Posts the rewards that another program appends to a file, for as long as a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.services.directory.status import goes_on
from composer_mesh.services.inspection.events_command import Lines
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.replay.post_reward import (
    POST,
    check_takes_rewards,
    insert_rewards,
    posted_by,
    unknown_rollouts,
)

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
                self._report(f"line {self._lines} is no post and left out: {reason}")
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
    queue, lines = RewardQueue(run, source or f"file {file.name}", report), Lines(file)

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
