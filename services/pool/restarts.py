"""Replaces dead replicas, within limits and with backoff, and records each restart.

    death -> its process is gone -> wait -> start, set up, serve
                                     ^            | failed
                                     +------------+  until the slot's budget is used up

    wait before restart k of a window = uniform(0, min(backoff_max_s, backoff_s * 2^k))

`membership` adds the new replica. The rules have no clock; full jitter keeps processes that died
together from restarting together.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from composer_mesh.mesh.failures import (
    cause_of,
    classify,
    error_key,
    is_deterministic,
    states_its_cause,
)
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.services.pool.replicas import Replica, ReplicaSpec, RestartRules


class RestartBudget:
    """The restarts of one slot. `now` is a reading of any monotonic clock."""

    def __init__(self, rules: RestartRules, name: str) -> None:
        self._rules = rules
        self._rng = random.Random(f"{rules.seed}:{name}")
        self._begun: deque[float] = deque()
        self._last_error = ""

    def take(self, now: float) -> float | None:
        """Use one restart; return the seconds to wait before it, None if none is left."""
        while self._begun and now - self._begun[0] >= self._rules.window_s:
            self._begun.popleft()
        if len(self._begun) >= self._rules.restarts:
            return None
        doubled = self._rules.backoff_s * 2.0 ** min(len(self._begun), 60)
        self._begun.append(now)
        return self._rng.uniform(0.0, min(self._rules.backoff_max_s, doubled))

    def repeats_its_error(self, error: BaseException) -> bool:
        """Whether a start failed by the same deterministic error as the start before it."""
        key, before = error_key(error), self._last_error
        self._last_error = key
        return is_deterministic(error) and key == before

    def spent(self) -> str:
        """Return the message for an exhausted budget."""
        return (
            f"given up after {self._rules.restarts} restarts within {self._rules.window_s:g} s: "
            "see what it died of, or raise supervision.restarts"
        )

    def served(self) -> None:
        """Reset the last error after a successful start."""
        self._last_error = ""
        if self._rules.forgives:
            self._begun.clear()


T = TypeVar("T")
Come = Callable[[Replica], Awaitable[Replica]]
GiveUp = Callable[[ActorDied], None]


class RestartsGivenUp(Exception):
    """No further replacement is started: the last failure, and why."""

    def __init__(self, error: Exception, why: str) -> None:
        self.cause = error.reason if isinstance(error, ActorDied) else cause_of(error)
        self.fields = {"cause": self.cause, "class": classify(error).value}
        super().__init__(f"{self.cause}; {why}")


async def restart(budget: RestartBudget, died: Exception, start: Callable[[], Awaitable[T]]) -> T:
    """Start a replacement, with the waits and retries that the budget allows.

    Raises `RestartsGivenUp` once no restart is left, or for a bug: at once where the error states
    that it is one, as of a user's function, else when two fail alike.
    """
    loop, error = asyncio.get_running_loop(), died
    while (wait_s := budget.take(loop.time())) is not None:
        await asyncio.sleep(wait_s)
        try:
            started = await start()
        except Exception as failed:
            error = failed
            if states_its_cause(failed):
                raise RestartsGivenUp(failed, "another process would fail alike") from failed
            if budget.repeats_its_error(failed):
                raise RestartsGivenUp(failed, "it failed in the same way twice") from failed
        else:
            budget.served()
            return started
    raise RestartsGivenUp(error, budget.spent())


class RestartManager:
    """Restarts the dead replicas of one service.

    `come` starts the next replica in the slot of a dead one; `give_up` is called with the reason
    if none will be started.
    """

    def __init__(self, spec: ReplicaSpec, rules: RestartRules, come: Come, give_up: GiveUp) -> None:
        self.restarts = 0
        self._spec, self._rules = spec, rules
        self._come, self._give_up = come, give_up
        self._budgets: dict[int, RestartBudget] = {}
        self._tasks = BackgroundTasks(spec.task_failed)
        self._under_way: dict[Replica, asyncio.Task[None]] = {}

    def under_way(self, dead: Replica) -> asyncio.Task[None] | None:
        """Return the task that replaces this dead replica, None if there is none."""
        return self._under_way.get(dead)

    def begin(self, dead: Replica, burial: asyncio.Task[None]) -> asyncio.Task[None]:
        """Replace a replica; the task ends when its slot is served again or given up."""
        task = self._tasks.start(f"replacing {dead.name}", self._heal(dead, burial))
        self._under_way[dead] = task
        task.add_done_callback(partial(self._ended, dead))
        return task

    def stop(self, dead: Replica) -> None:
        """Stop replacing a replica whose slot is no longer needed."""
        if task := self._under_way.get(dead):
            task.cancel()

    async def close(self) -> None:
        """Stop all replacements. Waits until those under way are cancelled."""
        await self._tasks.close()

    def _ended(self, dead: Replica, _: asyncio.Task[None]) -> None:
        self._under_way.pop(dead, None)

    async def _heal(self, dead: Replica, burial: asyncio.Task[None]) -> None:
        now, died = asyncio.get_running_loop().time, ActorDied(dead.name, dead.reason)
        began = now()
        await asyncio.wait([burial])  # its port, files and memory are free again
        try:
            replica = await restart(self._budget(dead.slot), died, partial(self._come, dead))
        except RestartsGivenUp as end:
            self._tell_end(dead, end)
        else:
            self._tell_restart(dead, replica, now() - began)

    def _budget(self, slot: int) -> RestartBudget:
        name = f"{self._spec.name}-{slot}"
        return self._budgets.setdefault(slot, RestartBudget(self._rules, name))

    def _tell_restart(self, dead: Replica, replica: Replica, took_s: float) -> None:
        self.restarts += 1
        pid = replica.actor.pid if replica.actor else None
        how = replica.caught_up or f"{took_s:.1f} s after the end of {dead.name}"
        self._record(
            "actor_restarted",
            replica.name,
            f"process {pid}{f' on {replica.host}' if replica.host else ''}, {how}",
            host=self._host_of(replica),
            generation=replica.generation,
            replaces=dead.name,
        )

    def _tell_end(self, dead: Replica, end: RestartsGivenUp) -> None:
        del self._under_way[dead]
        self._give_up(ActorDied(dead.name, str(end)))
        about = {"generation": dead.generation, **end.fields}
        self._record("actor_given_up", dead.name, str(end), host=self._host_of(dead), **about)

    def _host_of(self, replica: Replica) -> str:
        return replica.host or self._spec.host.name

    def _record(self, event: str, actor: str, detail: str, *, host: str, **fields: object) -> None:
        about = {"host": host, "kind": self._spec.actor_class.kind}
        self._spec.record(event, actor, detail, **about, **fields)
