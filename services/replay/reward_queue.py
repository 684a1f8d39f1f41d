"""Posts the rewards that another program appends to a file, for as long as a run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.services.directory.live import goes_on
from composer_mesh.services.inspection.events_command import Lines
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.replay.post_reward import (
    POST,
    check_takes_rewards,
    post_rewards,
    unknown_rollouts,
)

POLL_S = 1.0
MOST_WAITING = 100_000
"""Rewards that wait for rollouts which the run has not stored yet; the oldest go first."""


class RewardQueue:
    """The rewards of a file: those of stored rollouts are posted, others wait for theirs."""

    def __init__(self, run: Path, source: str, report: Callable[[str], object]) -> None:
        self._run, self._source, self._report = run, source, report
        self._lines = 0
        self.waiting: dict[str, float] = {}
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
            self.waiting[post.trace_id] = post.reward
        while len(self.waiting) > MOST_WAITING:
            lost = next(iter(self.waiting))
            del self.waiting[lost]
            self._report(f"more than {MOST_WAITING:,} rewards wait: {lost!r} is left out")

    def post(self) -> None:
        """Post the rewards of all rollouts that the run has stored."""
        unknown = set(unknown_rollouts(self._run, self.waiting))
        known = {name: reward for name, reward in self.waiting.items() if name not in unknown}
        if known:
            post_rewards(self._run, known, self._source)
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

    It is 1 where rewards are left for rollouts that the run never stored. The same file may be
    followed again: a reward that a rollout has already changes nothing. Raises LateRewardError
    where the run takes no late rewards.
    """
    check_takes_rewards(run)
    queue, lines = RewardQueue(run, source, report), Lines(file)
    goes_further = more or (lambda: goes_on(run))
    while True:
        again = goes_further()  # checked first, so that the last lines are not missed
        queue.take(lines.new())
        queue.post()
        if not again:
            break
        wait()
    if queue.waiting:
        name = next(iter(queue.waiting))
        report(f"{len(queue.waiting):,} rewards are for rollouts that {run} has not, as {name!r}")
    return int(bool(queue.waiting))
