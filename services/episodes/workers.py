"""The rollout workers of a run: which one plays which sample, and whom they may call.

    Rollouts -- sample --> RolloutWorkers --> the worker of its group, or the least busy one
    pools -- members change --> RolloutWorkers --> every worker: the generators and environments

An attempt is lost with its worker, and is then made again like any other that failed. The other
actors drop what a dead worker asked of them. A worker plays once it was told whom to call.

The rounds of a run in lockstep: each is a closed batch of every episode's next request.

    workers: names of waiting requests --> Rounds, until every announced episode has one
    workers <-- which generator takes which request ------- Rounds

The shares depend on the announced samples and on the number of generators, never on which worker
plays what: a run repeats bit for bit with any number of rollout workers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.actors.rollout_workers.lockstep import Round
from composer_mesh.actors.rollout_workers.peers import Neighbours
from composer_mesh.mesh.call_stream import Calls, CallStream
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.heartbeat import ActivityLog
from composer_mesh.mesh.supervision import ActorDied, Recorder
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.rollouts.episode import Played, Sample
from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services.pool.dispatch import ServiceClosed
from composer_mesh.services.pool.replicas import PoolPeers, Replica
from composer_mesh.services.service import Service


class LockstepRounds:
    """Decides when a round is complete; `release` is called with each complete one."""

    def __init__(
        self, generators: Callable[[], Sequence[str]], release: Callable[[Round], None]
    ) -> None:
        """`generators` returns the names of those that serve, in the order of their slots."""
        self._generators, self._release = generators, release
        self._live: Counter[str] = Counter()
        self._places: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._waiting: dict[str, Sequence[str]] = {}
        self._begun = False
        """Whether the live episodes have had a round."""
        self.number = -1
        """Number of the last round."""

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        """Count samples as live from now on, until their contexts are left."""
        for sample in samples:
            self._live[sample.trace_id] += 1
            self._places[sample.trace_id] = len(self._places)
            self._groups.setdefault(sample.group, len(self._groups))
        return [self._counted(sample.trace_id) for sample in samples]

    def wait(self, worker: str, names: Sequence[str]) -> None:
        """Note all requests that wait at a worker, in place of those noted before."""
        self._waiting[worker] = names
        self.check()

    def lose(self, worker: str) -> None:
        """Forget what waits at a worker that is gone: its episodes begin again elsewhere."""
        self._waiting.pop(worker, None)
        self.check()

    @contextmanager
    def _counted(self, trace_id: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._live -= Counter([trace_id])
            if not self._live:
                self._begun = False
                self._places.clear()
                self._groups.clear()
            self.check()

    def check(self) -> None:
        """Release the round if it is complete; call it when a generator begins to serve too."""
        noted = [name for waiting in self._waiting.values() for name in waiting]
        names = [name for name in noted if _episode(name) in self._live]  # others were cancelled
        generators = self._generators()
        if names and generators and len(names) >= self._live.total():
            self._waiting.clear()
            self.number += 1
            shares = self._shares(sorted(names), generators)
            continues, self._begun = self._begun, True
            self._release(Round(self.number, continues, shares))

    def _shares(
        self, names: Sequence[str], generators: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Divide requests by groups, which have prompts in common, or singly where groups are few.

        An episode keeps its generator while the number of generators stays the same.
        """
        shares: dict[str, list[str]] = {}
        for name in names:
            episode = _episode(name)
            place = self._places[episode]
            if len(self._groups) >= len(generators):
                place = self._groups[episode.rpartition("-")[0]]
            shares.setdefault(generators[place % len(generators)], []).append(name)
        return shares


def _episode(request: str) -> str:
    """Return the trace id of a request's episode."""
    return request.rpartition("-")[0]


OpenStream = Callable[[str, Any, Callable[[BaseException], None]], Calls]
"""Opens the calls to a worker, given its name, its reference and whom to tell that they broke."""

EPISODES_WAIT_S = 4.0
"""Longest wait of a message to or from a worker: that of episodes that take more than 256 s."""

ROUNDS_WAIT_S = 0.002
"""Longest wait of a message to or from a worker in lockstep, where all episodes wait for it."""


@dataclass(frozen=True)
class RolloutPools:
    """The services that play episodes together."""

    workers: Service
    generators: Service
    environments: Service


class RolloutWorkers:
    """Plays samples on the workers of a pool, on one event loop.

    With `lockstep`, all samples take their turns together.
    """

    def __init__(
        self,
        pools: RolloutPools,
        record: Recorder,
        *,
        lockstep: bool,
        open_stream: OpenStream | None = None,
        activity: ActivityLog | None = None,
    ) -> None:
        longest_wait_s = ROUNDS_WAIT_S if lockstep else EPISODES_WAIT_S
        ours = partial(_open_stream, longest_wait_s)
        self._pools, self._open_stream = pools, open_stream or ours
        self._activity = activity or ActivityLog()
        self._calls: dict[str, Calls] = {}
        self._open: list[str] = []
        self._connected: set[str] = set()
        self._playing: Counter[str] = Counter()
        self._groups: dict[str, str] = {}
        self._members: Counter[str] = Counter()
        self._generators = PoolPeers(pools.generators)
        self._environments = PoolPeers(pools.environments)
        self._known: Neighbours | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._died: ActorDied | None = None
        """Set when a pool has nothing left to play with."""
        self._tasks = BackgroundTasks(recorded_by(record))
        self._rounds = LockstepRounds(self._generator_names, self._release) if lockstep else None
        for pool in (pools.workers, pools.generators, pools.environments):
            pool.on_change(self._update)
        self._update()

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        """Count samples from now on, so that no round of lockstep leaves them out."""
        if self._rounds is None:
            return [nullcontext() for _ in samples]
        return self._rounds.announce(samples)

    async def play(self, sample: Sample, session: str) -> Played:
        """Play one attempt. Waits for a worker, and for the last turn.

        Raises `NoReplicaLeft` where a pool has nothing left to play with.
        """
        self._members[sample.group] += 1
        try:
            worker = await self._worker_for(sample.group)
            self._playing[worker] += 1
            try:
                with self._activity.call(worker, "play"):
                    played: Played = await self._calls[worker].call("play", sample, session)
                return played
            finally:
                self._playing[worker] -= 1
        finally:
            self._left(sample.group)

    async def score_group(self, episode: Episode, group: Sequence[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together. Waits for a worker and an environment."""
        worker = await self._some_worker()
        score: GroupScore = await self._calls[worker].call("score_group", episode, list(group))
        return score

    async def close(self) -> None:
        """End the connections to the workers, after every sample has ended."""
        self._closed = True
        await self._tasks.close()
        await asyncio.gather(*(calls.close() for calls in self._calls.values()))

    async def _worker_for(self, group: str) -> str:
        """Return the worker of a group, whose samples share a prompt; waits until there is one."""
        while True:
            worker = self._groups.get(group)
            if worker in self._open and self._died is None:
                return worker
            if self._open or self._died is not None:
                worker = self._groups[group] = self._least_busy()
                return worker
            await self._changed.wait()

    async def _some_worker(self) -> str:
        """Return the least busy worker; waits until there is one."""
        while not self._open and self._died is None:
            await self._changed.wait()
        return self._least_busy()

    def _least_busy(self) -> str:
        if self._died is not None:
            raise self._died
        return min(self._open, key=lambda name: self._playing[name])

    def _left(self, group: str) -> None:
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
            self._groups.pop(group, None)

    def _update(self) -> None:
        """Follow a change of the pools: connect to new workers, and tell all about the others."""
        if self._closed:
            return
        pools = self._pools
        workers = {one.name: one for one in pools.workers.members() if one.serving}
        for name in self._calls.keys() - workers.keys():
            self._lose(name)
        for name in workers.keys() - self._calls.keys():
            self._begin(workers[name])
        self._find_open()
        self._tell_workers()
        for pool in (pools.workers, pools.generators, pools.environments):
            if not pool.hopeful:
                self._give_up(pool.last_death())
        if self._rounds is not None:
            self._rounds.check()  # a complete round may have waited for a generator
        self._wake()

    def _find_open(self) -> None:
        workers = self._pools.workers.members()
        self._open = [one.name for one in workers if one.open and one.name in self._connected]

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _begin(self, worker: Replica) -> None:
        assert worker.actor is not None
        broken = partial(self._broken, worker.name)
        self._calls[worker.name] = self._open_stream(worker.name, worker.actor.ref, broken)
        if self._known is not None:
            self._connect(worker.name, self._known)

    def _broken(self, worker: str, error: BaseException) -> None:
        """Have a worker replaced whose answers can no longer be read here."""
        reason = f"its answers can no longer be read: {cause_of(error)}"
        self._pools.workers.lose(worker, reason)

    def _lose(self, worker: str) -> None:
        calls = self._calls.pop(worker)
        self._connected.discard(worker)
        calls.lose(ActorDied(worker, self._pools.workers.reason(worker)))
        self._tasks.start(f"closing the calls to {worker}", calls.close())
        self._tasks.start(f"ending the calls of {worker}", self._hang_up(worker))
        if self._rounds is not None:
            self._rounds.lose(worker)

    async def _hang_up(self, worker: str) -> None:
        """Have the other actors drop what a worker that is gone asked of them."""
        pools = [self._pools.generators, self._pools.environments]
        await asyncio.gather(*(_on_all(pool, "hang_up", worker) for pool in pools))
        if self._rounds is not None:
            await _on_all(self._pools.generators, "close_round", self._rounds.number)

    def _tell_workers(self) -> None:
        changed = [peers.refresh() for peers in (self._generators, self._environments)]
        if self._known is not None and not any(changed):
            return
        gone = {**self._generators.gone, **self._environments.gone}
        known = Neighbours(self._generators.peers, self._environments.peers, gone)
        self._known = known
        for worker in self._calls:
            self._connect(worker, known)

    def _connect(self, worker: str, known: Neighbours) -> None:
        self._tasks.start(f"connecting {worker}", self._until_connected(worker, known))

    async def _until_connected(self, worker: str, known: Neighbours) -> None:
        """Tell a worker whom it may call, again where that fails; then it may play.

        One that fails twice is replaced.
        """
        try:
            await self._until_gone(worker, "connect", worker, known)
        except Exception:  # noqa: BLE001  supervision boundary: tried once more
            try:
                await self._until_gone(worker, "connect", worker, self._known or known)
            except Exception as error:  # noqa: BLE001  supervision boundary: it is replaced
                self._pools.workers.lose(worker, f"its connect failed: {cause_of(error)}")
        if worker in self._calls and worker not in self._connected:
            self._connected.add(worker)
            if self._rounds is not None:
                waiting = self._hear_of_waiting(worker, self._rounds)
                self._tasks.start(f"rounds of {worker}", waiting)
            self._find_open()
            self._wake()

    async def _until_gone(self, worker: str, endpoint: str, *args: Any) -> None:
        """Call a worker; nothing is left to do where it dies of it."""
        if (calls := self._calls.get(worker)) is None:
            return
        try:
            await calls.call(endpoint, *args)
        except ActorDied:
            return

    async def _hear_of_waiting(self, worker: str, rounds: LockstepRounds) -> None:
        while worker in self._calls:
            try:
                names = await self._calls[worker].call("waiting")
            except ActorDied:
                return
            rounds.wait(worker, names)

    def _release(self, turn: Round) -> None:
        for worker in self._calls:
            releasing = self._until_gone(worker, "release", turn)
            self._tasks.start(f"round {turn.number} of {worker}", releasing)

    def _generator_names(self) -> list[str]:
        return [one.name for one in self._pools.generators.members() if one.open]

    def _give_up(self, died: ActorDied) -> None:
        self._died = died
        for calls in self._calls.values():
            calls.lose(died)


def _open_stream(
    longest_wait_s: float, worker: str, ref: Any, broken: Callable[[BaseException], None]
) -> Calls:
    return CallStream("controller", worker, ref, longest_wait_s, broken)


async def _on_all(pool: Service, endpoint: str, *args: Any) -> None:
    """Call an endpoint of each replica that serves; those that are gone have nothing to drop."""
    with suppress(ActorDied, ServiceClosed):
        await pool.fanout(endpoint, *args)
