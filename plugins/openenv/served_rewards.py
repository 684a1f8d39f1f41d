"""Posts the late rewards that an OpenEnv server tells, for as long as a run continues."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from composer_mesh.mesh.failures import cause_of
from composer_mesh.plugins.openenv.client.errors import ServerFailure
from composer_mesh.plugins.openenv.client.server import Server
from composer_mesh.plugins.openenv.client.wire import ServedRewards
from composer_mesh.services.replay.post_reward import (
    check_takes_rewards,
    insert_rewards,
    last_posted,
    until_ended,
)
from composer_mesh.services.store.reading import RunReader

POLL_S = 5.0
MOST_WAITING = 100_000
"""Rewards that wait for rollouts which the run has not stored yet; the oldest go first."""


class ServedQueue:
    """The late rewards of a server: those of stored rollouts are posted, others wait for theirs.

    Others may use the server too, so what belongs to no rollout of the run is no error. A reward
    that the run has from this source already, as its last one for the rollout, is not posted again.
    """

    def __init__(
        self, run: Path, server: Server, source: str, report: Callable[[str], object]
    ) -> None:
        self._run, self._server, self._source, self._report = run, server, source, report
        self._last, self._store, self._read = 0, "", set[int]()
        self._rollouts: dict[str, str] = {}
        self._posted = last_posted(run, source)
        self.waiting: dict[str, float] = {}
        """Rewards by episode id that are not posted yet, in order of arrival."""
        self.failed = ""
        """Why the server could not be queried last time; empty where it could."""

    def look(self) -> None:
        """Ask the server for new rewards, and post those of rollouts that are stored by now."""
        self._ask()
        with RunReader(self._run) as reader:
            self._learn(reader)
        ready = [name for name in self.waiting if name in self._rollouts]
        new = [(self._rollouts[name], self.waiting.pop(name)) for name in ready]
        new = [(trace, reward) for trace, reward in new if self._posted.get(trace) != reward]
        if new:
            insert_rewards(self._run, new, self._source)
            self._posted |= dict(new)

    def _ask(self) -> None:
        """Take what the server has; an outage is reported once, and its rewards come later."""
        try:
            while self._takes(self._server.rewards_after(self._last)):
                pass
        except ServerFailure as error:
            if not self.failed:
                self._report(f"{cause_of(error)}; it is queried again until the run ends")
            self.failed = str(error)
        else:
            self.failed = ""
        while len(self.waiting) > MOST_WAITING:
            del self.waiting[next(iter(self.waiting))]

    def _takes(self, served: ServedRewards) -> bool:
        """Take what the server reported; returns whether there may be more."""
        if served.store != self._store:  # its numbers begin anew
            again, self._store, self._last = bool(self._last), served.store, 0
            if again:
                return True
        for one in served.rewards:
            self._last = one.number
            self.waiting.pop(one.episode_id, None)
            self.waiting[one.episode_id] = one.reward
        return bool(served.rewards)

    def _learn(self, reader: RunReader) -> None:
        """Read the episode ids of groups that were stored since the last look."""
        for group in reader.groups():
            if group.group_id in self._read or not group.traces:
                continue
            self._read.add(group.group_id)
            for trace in reader.traces(group.group_id):
                if trace.episode_id:
                    self._rollouts[trace.episode_id] = trace.trace_id


def follow_server(
    run: Path,
    server: Server,
    source: str,
    *,
    more: Callable[[], bool] | None = None,
    wait: Callable[[], None] = lambda: time.sleep(POLL_S),
    report: Callable[[str], object] = lambda said: sys.stderr.write(f"composer-mesh: {said}\n"),
) -> int:
    """Post the late rewards of a server until the run ends; return the exit status.

    It is 1 where the server could not be queried last. Raises LateRewardError where the run takes
    no late rewards.
    """
    check_takes_rewards(run)
    queue = ServedQueue(run, server, source, report)
    until_ended(run, queue.look, more, wait)
    if queue.failed:
        report(f"the last rewards may be missing: {queue.failed}")
    return int(bool(queue.failed))
