"""One replica of a service: its process, its calls in flight, and how it is started and stopped.

`routing` decides which calls it gets, `membership` how many replicas there are.

Before it serves, a replica receives the set-up calls: the last per endpoint. A call that reads
another actor's memory is stale once that actor is gone: a replica that starts then waits for a
newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from composer_mesh.actors.rollout_workers.peers import Peer
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, record_nothing, while_alive
from composer_mesh.mesh.supervision import (
    ActorDied,
    DeadlineExceeded,
    FaultPolicy,
    HostLost,
    Recorder,
)
from composer_mesh.mesh.waiting import Failed, reported_to_loop
from composer_mesh.planning.placement_solver import NoCapacity
from composer_mesh.services.pool.process_placement import PlacementOf, ProcessPlacement
from composer_mesh.services.pool.restarts import RestartRules
from composer_mesh.services.pool.routing import ReplicaState, RoutingTarget

T = TypeVar("T")

LOOK_S = 1.0


async def wait_for_capacity(
    take: Callable[[], T], host: MeshHost, name: str, look_s: float = LOOK_S
) -> T:
    """Return the result of `take`, retrying until a host has capacity; for displaced processes.

    Records the wait and its reason. Raises `NoCapacity` after `host.capacity_wait_s`.
    """
    loop, recorded = asyncio.get_running_loop(), False
    end = loop.time() + host.capacity_wait_s
    while True:
        try:
            return take()
        except NoCapacity as error:
            if loop.time() >= end:
                raise
            if host.supervisor is not None and not recorded:
                host.supervisor.note("waits_for_capacity", name, str(error))
            recorded = True
        await asyncio.sleep(look_s)


@dataclass(frozen=True)
class Call:
    """An endpoint call with its arguments; `source` is an actor whose memory it reads."""

    endpoint: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    source: SpawnedActor | None = None

    @property
    def stale(self) -> bool:
        """Whether the actor that it reads from is gone."""
        return self.source is not None and not self.source.alive


@dataclass(eq=False)
class Replica(RoutingTarget):
    """One process of a service and its calls in flight.

    `generation` counts the processes that have had this slot; `received` are the set-up calls it
    has received, `caught_up` is the description that the service's own catch-up returned; `host` is
    the name of its host, None on the controller's machine. A call is in flight until its answer,
    its deadline or the replica's end, also after its caller was cancelled.
    """

    slot: int = 0
    generation: int = 1
    actor: SpawnedActor | None = field(default=None, repr=False)
    host: str | None = None
    failures: int = 0
    reason: str = ""
    received: dict[str, Call] = field(default_factory=dict, repr=False)
    caught_up: str = ""
    under_way: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    stirred: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def ended(self) -> bool:
        """Whether its process no longer answers."""
        return self.state in (ReplicaState.DEAD, ReplicaState.STOPPED)

    async def call(self, call: Call, deadline_s: float) -> Any:
        """Call the actor. Waits for its answer, at most `deadline_s`."""
        assert self.actor is not None
        asking = self.actor.call(call.endpoint, *call.args, deadline_s=deadline_s, **call.kwargs)
        return await (asking if call.source is None else while_alive(call.source, asking))

    async def drained(self, drain_s: float, sessions: bool = True) -> bool:
        """Wait until no call or session is left, at most `drain_s`; return False on timeout.

        Those that other actors have there count too.
        """
        try:
            async with asyncio.timeout(drain_s):
                while self.serving and (self.outstanding or (sessions and self.tied)):
                    self.stirred.clear()
                    await self.stirred.wait()
                while sessions and self.serving and await self._in_use():  # noqa: ASYNC110
                    await asyncio.sleep(IN_USE_EVERY_S)
        except TimeoutError:
            return False
        return True

    async def _in_use(self) -> bool:
        """Whether other actors than the service's own callers use it.

        False for one that died or does not answer; True where its answer is an error, since its
        sessions may be alive.
        """
        if self.actor is None:
            return False
        try:
            about: dict[str, Any] = await self.actor.call("describe", deadline_s=IN_USE_DEADLINE_S)
        except (ActorDied, DeadlineExceeded, HostLost):
            return False
        except Exception:  # noqa: BLE001  whatever was raised there; the drain's limit ends it
            return True
        return bool(about["in_use"])

    def about(self) -> dict[str, Any]:
        """Return this replica's entry of `Service.status`."""
        return {
            "name": self.name,
            "state": self.state.value,
            "generation": self.generation,
            "pid": self.actor.pid if self.actor else None,
            "host": self.host,
            "outstanding": self.outstanding,
            "calls": self.calls,
            "sessions": self.sessions,
            "failures": self.failures,
            "reason": self.reason,
        }


IN_USE_EVERY_S = 0.1
"""Seconds between two questions to a draining replica whether others still use it."""
IN_USE_DEADLINE_S = 5.0
"""One that does not answer for so long is not waited for."""

Env = Mapping[str, str] | Callable[[int], Mapping[str, str]]
"""Environment variables of every process of a service, or a function of the slot."""
CatchUp = Callable[[Replica, Sequence[Call]], Awaitable[str]]
"""Brings a loaded replica to the state of the others, given the set-up calls that it has not
received; returns a description for the event of its restart."""


@dataclass(frozen=True)
class ReplicaSpec:
    """How the processes of a service are started, and the rules of their restarts (None: never).

    `deadline_s` applies to each set-up call of a restarted replica; `numbered` says whether the
    first slot has its number in its name, and `stable_names` whether a replacement has the name of
    the process that it replaces; `placement`, called with the slot, also gives the host and
    replaces `env`. Without `catch_up` a replica receives the set-up calls themselves.
    """

    name: str
    actor_class: type[MeshActor]
    host: MeshHost
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Env | None = None
    policy: FaultPolicy = FaultPolicy.OWNER
    deadline_s: float = 120.0
    restart: RestartRules | None = None
    record: Recorder = record_nothing
    numbered: bool = True
    placement: PlacementOf | None = None
    stable_names: bool = False
    catch_up: CatchUp | None = None

    @property
    def task_failed(self) -> Failed:
        """What happens with an exception of a service's background task."""
        return reported_to_loop if self.record is record_nothing else recorded_by(self.record)

    async def start(self, replica: Replica) -> None:
        """Start a replica's process at its current placement. Waits until its actor answers.

        A replacement also waits for capacity, where its host is lost.
        """

        def take() -> ProcessPlacement:
            if self.placement is not None:
                return self.placement(replica.slot)
            env = self.env(replica.slot) if callable(self.env) else self.env
            return ProcessPlacement(None, env or {})

        is_first = replica.generation == 1
        place = take() if is_first else await wait_for_capacity(take, self.host, replica.name)
        replica.host = place.host
        replica.actor = await self.host.spawn(
            replica.name,
            self.actor_class,
            *self.args,
            on=place.host,
            env=place.env,
            policy=self.policy,
            **self.kwargs,
        )

    async def stop(self, replica: Replica) -> None:
        """Stop a replica's process, dead or alive. Waits until it is gone."""
        if replica.actor is not None:
            await self.host.stop(replica.actor)


LOAD = "load"
"""The set-up call that is slow and stays valid."""
TELL_S = 3.0
"""Longest time until an actor's death is known after a read of its memory has failed.

Such a read may fail immediately, and on a busy machine the notice of a process's end may be later.
"""


class Setups:
    """The set-up calls, in the order in which they were last made."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._remembered = asyncio.Event()

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._calls

    def remember(self, call: Call) -> None:
        """Store a call in place of the last one of its endpoint."""
        self._calls.pop(call.endpoint, None)
        self._calls[call.endpoint] = call
        self._remembered.set()

    def loads(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica can receive while others are set up: they stay valid."""
        first = takewhile(lambda call: call.endpoint == LOAD, self._calls.values())
        return [call for call in first if replica.received.get(LOAD) is not call]

    def unsent_calls(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica has not received yet."""
        return [
            call for call in self._calls.values() if replica.received.get(call.endpoint) is not call
        ]

    async def readable(self, deadline_s: float) -> None:
        """Wait until no call is stale; after `deadline_s` raise the death of its source."""
        try:
            async with asyncio.timeout(deadline_s):
                while any(call.stale for call in self._calls.values()):
                    self._remembered.clear()
                    await self._remembered.wait()
        except TimeoutError:
            raise self._end_of_source() from None

    def _end_of_source(self) -> ActorDied:
        sources = (call.source for call in self._calls.values() if call.stale)
        name = next((source.name for source in sources if source), "its source")
        return ActorDied(name, "nothing took the place of what it had published")


async def source_ended(call: Call) -> ActorDied | None:
    """Return the death of the actor that a failed call read from, if it explains the failure."""
    if call.source is None or call.source.death is None:
        return None
    await asyncio.wait([call.source.death], timeout=TELL_S)
    return ActorDied(*call.source.death.result().args) if call.stale else None


class Members(Protocol):
    """What is known of the members of a service, and of why one of them is gone."""

    def members(self) -> Sequence[Replica]: ...
    def reason(self, name: str) -> str: ...


@dataclass
class PoolPeers:
    """Members of a pool that serve, and why those that served before are gone, by name."""

    pool: Members
    peers: tuple[Peer, ...] = ()
    gone: dict[str, str] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Follow the pool; returns whether a member came, went, opened or closed."""
        before, self.peers = self.peers, _serving(self.pool)
        serving = {peer.name for peer in self.peers}
        for peer in before:
            if peer.name not in serving:
                self.gone[peer.name] = self.pool.reason(peer.name)
        return _state(before) != _state(self.peers)


def _serving(pool: Members) -> tuple[Peer, ...]:
    return tuple(
        Peer(one.name, one.actor.ref, one.open)
        for one in pool.members()
        if one.serving and one.actor is not None
    )


def _state(peers: tuple[Peer, ...]) -> list[tuple[str, bool]]:
    return [(peer.name, peer.open) for peer in peers]
