"""The rollout workers of a run: which one plays which sample, and whom they may call.

    Rollouts -- sample --> RolloutWorkers --> the worker of its group, or the least busy one
    pools -- members change --> RolloutWorkers --> every worker: the generators and environments

An attempt ends with its worker. The next one continues in its session, if an environment still has
that; the other actors drop everything else that a dead worker requested. A worker plays once it
knows whom to call.

    worker dies --> close_calls: environments say which sessions are left, and how far they are
    next attempt --> another worker, with the session and its environment

The rounds of a run in lockstep: each is a closed batch of every episode's next request.

    workers: names of waiting requests --> Rounds, until every announced episode has one
    workers <-- which generator takes which request ------- Rounds

The shares depend on the announced samples and on the number of generators, never on which worker
plays what: a run repeats bit for bit with any number of rollout workers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from composer_mesh.actors.rollout_workers.peers import Neighbours, Peer, Peers, Round
from composer_mesh.mesh.call_stream import Calls, CallStream
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.supervision import ActorDied, Recorder
from composer_mesh.mesh.waiting import BackgroundTasks, together, unless
from composer_mesh.rollouts.episode import Played, Sample
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore
from composer_mesh.services.episodes.rollout import WorkerLost
from composer_mesh.services.pool.dispatch import NoReplicaLeft, ServiceClosed
from composer_mesh.services.pool.replicas import Replica
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


@dataclass
class PoolPeers:
    """Members of a pool that serve, and why those that served before are gone, by name."""

    pool: Service
    peers: tuple[Peer, ...] = ()
    gone: dict[str, str] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Follow the pool; returns whether a member came, went, opened or closed."""
        before, self.peers = self.peers, _serving_peers(self.pool)
        serving = {peer.name for peer in self.peers}
        for peer in before:
            if peer.name not in serving:
                self.gone[peer.name] = self.pool.reason(peer.name)
        return _open_by_name(before) != _open_by_name(self.peers)


def _serving_peers(pool: Service) -> tuple[Peer, ...]:
    return tuple(
        Peer(one.name, one.actor.ref, one.open) for one in serving(pool) if one.actor is not None
    )


def serving(pool: Service) -> list[Replica]:
    """Return the replicas that take calls, those that drain too."""
    return [one for one in pool.members() if one.serving and one.actor is not None]


def _open_by_name(peers: tuple[Peer, ...]) -> list[tuple[str, bool]]:
    return [(peer.name, peer.open) for peer in peers]


OpenStream = Callable[[str, Any, Callable[[BaseException], None]], Calls]
"""Opens the calls to a worker, given its name, its reference and whom to tell that they broke."""

EPISODES_WAIT_S = 4.0
"""Longest wait of a message to or from a worker: that of episodes that take more than 256 s."""

ROUNDS_WAIT_S = 0.002
"""Longest wait of a message to or from a worker in lockstep, where all episodes wait for it."""


@dataclass(frozen=True)
class LeftSession:
    """A session of a dead worker, open at the environment `home`, after so many turns."""

    name: str
    home: str
    turns: int


@dataclass(frozen=True)
class RolloutPools:
    """The services that play episodes together."""

    workers: Service
    generators: Service
    environments: Service


class RolloutWorkers:
    """Plays samples on the workers of a pool, on one event loop.

    With `lockstep`, all samples take their turns together. After the death of a worker its samples
    wait at most `left_s` seconds to learn whether their sessions are left.
    """

    left_s: ClassVar[float] = 30.0

    def __init__(
        self,
        pools: RolloutPools,
        record: Recorder,
        *,
        lockstep: bool,
        open_stream: OpenStream | None = None,
    ) -> None:
        longest_wait_s = ROUNDS_WAIT_S if lockstep else EPISODES_WAIT_S
        open_one = open_stream or partial(_open_stream, longest_wait_s)
        self._pools = pools
        self._workers = Peers(lambda name, ref: open_one(name, ref, partial(self._broken, name)))
        self._serving: list[str] = []
        self._connected: set[str] = set()
        self._playing: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """The samples that each worker plays, by their group."""
        self._sessions: defaultdict[str, set[str]] = defaultdict(set)
        """The sessions of the samples that each worker plays."""
        left_of = asyncio.get_running_loop().create_future
        self._left_by: defaultdict[str, asyncio.Future[dict[str, LeftSession]]]
        self._left_by = defaultdict(left_of)
        """By dead worker: its sessions that are open, once the environments have answered."""
        self._left: dict[str, LeftSession] = {}
        """By trace id: the session in which the next attempt continues."""
        self._members = PoolPeers(pools.workers)
        self._generators = PoolPeers(pools.generators)
        self._environments = PoolPeers(pools.environments)
        self._known: Neighbours | None = None
        self._closed = False
        self._died: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
        """Done when a pool has nothing left to play with."""
        self._tasks = BackgroundTasks(recorded_by(record))
        self._rounds = LockstepRounds(self._generator_names, self._release) if lockstep else None
        for pool in (pools.workers, pools.generators, pools.environments):
            pool.on_change(self._update)
        self._update()

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        """Count samples from now on, so that no round of lockstep leaves them out.

        A session that is left of one when its context ends is dropped.
        """
        counted: Sequence[AbstractContextManager[None]] = [nullcontext() for _ in samples]
        if self._rounds is not None:
            counted = self._rounds.announce(samples)
        return [self._live(one, it.trace_id) for one, it in zip(counted, samples, strict=True)]

    async def play(self, sample: Sample, session: str) -> Played:
        """Play one attempt. Waits for a worker, and for the last turn.

        One that is left of a dead worker is continued in its own session instead of this one.
        Raises `WorkerLost` where the next attempt can continue this one, and `NoReplicaLeft` where
        a pool has nothing left to play with.
        """
        worker = await self._worker_for(sample.group)
        left = self._left.pop(sample.trace_id, LeftSession(session, "", 0))
        self._playing[worker][sample.group] += 1
        self._sessions[worker].add(left.name)
        try:
            played: Played = await self._workers.call(worker, "play", sample, left.name, left.home)
            return played
        except asyncio.CancelledError:
            if left.home:  # its worker may not have adopted it yet
                self._drop(left.name)
            raise
        except ActorDied as died:
            if died.actor != worker or isinstance(died, NoReplicaLeft):
                raise
            if (found := await self._left_of(worker, left.name)) is None:
                raise
            self._left[sample.trace_id] = found
            raise WorkerLost(worker, died.reason, found.turns) from died
        finally:
            self._playing[worker] -= Counter([sample.group])
            self._sessions[worker].discard(left.name)

    async def score_group(self, episode: Episode, group: Sequence[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together. Waits for a worker and an environment."""
        worker = await self._worker_for("")
        score: GroupScore = await self._workers.call(worker, "score_group", episode, list(group))
        return score

    async def close(self) -> None:
        """End the connections to the workers, after every sample has ended."""
        self._closed = True
        await self._tasks.close()
        await self._workers.close()

    async def _worker_for(self, group: str) -> str:
        """Return the worker that plays samples of a group, which share a prompt, or the least busy.

        Waits until a worker may play.
        """
        while not (self._workers.open or self._died.done()):
            await unless(self._workers.some_open(), [self._died], self._died.result)
        if self._died.done():
            raise self._died.result()
        its_own = [name for name in self._workers.open if self._playing[name][group]]
        return min(its_own or self._workers.open, key=lambda name: self._playing[name].total())

    async def _left_of(self, worker: str, session: str) -> LeftSession | None:
        """Return a dead worker's session if it is open. Waits for the environments' answers."""
        answer = self._left_by[worker]
        await asyncio.wait([answer], timeout=self.left_s)
        return answer.result().get(session) if answer.done() else None

    def _update(self) -> None:
        """Follow a change of the pools: connect to new workers, and tell all about the others."""
        if self._closed:
            return
        pools = self._pools
        self._members.refresh()
        before, self._serving = self._serving, [one.name for one in self._members.peers]
        self._connected.intersection_update(self._serving)
        self._find_open()
        for name in set(before).difference(self._serving):
            self._lose(name)
        if self._known is not None:
            for name in [one for one in self._serving if one not in before]:
                self._connect(name, self._known)
        self._tell_workers()
        for pool in (pools.workers, pools.generators, pools.environments):
            if not pool.can_serve:
                self._give_up(pool.last_death())
        if self._rounds is not None:
            self._rounds.check()  # a complete round may have waited for a generator

    def _find_open(self) -> None:
        """Let those workers play that serve and know whom to call."""
        members = [
            replace(one, open=one.open and one.name in self._connected)
            for one in self._members.peers
        ]
        self._workers.update(tuple(members), self._members.gone)

    def _broken(self, worker: str, error: BaseException) -> None:
        """Have a worker replaced whose answers can no longer be read here."""
        reason = f"its answers can no longer be read: {cause_of(error)}"
        self._pools.workers.lose(worker, reason)

    def _lose(self, worker: str) -> None:
        self._tasks.start(f"ending the calls of {worker}", self._disconnect(worker))
        if self._rounds is not None:
            self._rounds.lose(worker)

    async def _disconnect(self, worker: str) -> None:
        """Have the other actors drop what a worker that is gone requested of them.

        Sessions of episodes that it played are left open for others.
        """
        wanted, left = sorted(self._sessions[worker]), dict[str, LeftSession]()
        environments = [_left_at(one, worker, wanted) for one in serving(self._pools.environments)]
        ending = call_serving(self._pools.generators, "close_calls", worker)
        try:
            _, *answers = await together(ending, *environments)
            for found in answers:
                left |= found
        finally:
            self._left_by[worker].set_result(left)
        for name in left.keys() - self._sessions[worker]:  # nobody waits for them any more
            self._drop(name)
        if self._rounds is not None:
            await call_serving(self._pools.generators, "close_round", self._rounds.number)

    @contextmanager
    def _live(self, counted: AbstractContextManager[None], trace_id: str) -> Iterator[None]:
        try:
            with counted:
                yield
        finally:
            if (left := self._left.pop(trace_id, None)) is not None:
                self._drop(left.name)

    def _drop(self, session: str) -> None:
        """Have the session of an episode dropped that is not continued."""
        dropping = call_serving(self._pools.environments, "forget", session)
        self._tasks.start(f"dropping {session}", dropping)

    def _tell_workers(self) -> None:
        changed = [peers.refresh() for peers in (self._generators, self._environments)]
        if self._known is not None and not any(changed):
            return
        gone = {**self._generators.gone, **self._environments.gone}
        known = Neighbours(self._generators.peers, self._environments.peers, gone)
        self._known = known
        for worker in self._serving:
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
        if worker in self._serving and worker not in self._connected:
            self._connected.add(worker)
            if self._rounds is not None:
                waiting = self._hear_of_waiting(worker, self._rounds)
                self._tasks.start(f"rounds of {worker}", waiting)
            self._find_open()

    async def _until_gone(self, worker: str, endpoint: str, *args: Any) -> None:
        """Call a worker; nothing is left to do where it dies of it."""
        with suppress(ActorDied):
            await self._workers.call(worker, endpoint, *args)

    async def _hear_of_waiting(self, worker: str, rounds: LockstepRounds) -> None:
        with suppress(ActorDied):
            while True:
                rounds.wait(worker, await self._workers.call(worker, "waiting"))

    def _release(self, turn: Round) -> None:
        for worker in self._serving:
            releasing = self._until_gone(worker, "release", turn)
            self._tasks.start(f"round {turn.number} of {worker}", releasing)

    def _generator_names(self) -> list[str]:
        return [one.name for one in self._pools.generators.members() if one.open]

    def _give_up(self, died: ActorDied) -> None:
        if not self._died.done():
            self._died.set_result(died)
        self._workers.lose(died)


def _open_stream(
    longest_wait_s: float, worker: str, ref: Any, broken: Callable[[BaseException], None]
) -> Calls:
    return CallStream("controller", worker, ref, longest_wait_s, broken)


async def _left_at(
    environment: Replica, worker: str, wanted: Sequence[str]
) -> dict[str, LeftSession]:
    """End the calls of a dead worker; return which of the sessions are left there, by name."""
    assert environment.actor is not None
    with suppress(ActorDied):
        turns = await environment.actor.call("close_calls", worker, wanted)
        return {name: LeftSession(name, environment.name, n) for name, n in turns.items()}
    return {}


async def call_serving(pool: Service, endpoint: str, *args: Any) -> None:
    """Call an endpoint of each replica that serves; those that are gone have nothing to drop."""
    with suppress(ActorDied, ServiceClosed):
        await pool.fanout(endpoint, *args)
