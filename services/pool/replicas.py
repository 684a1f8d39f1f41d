"""The replicas of a service: which of them takes which call, and how a process starts and stops.

    call --> the open replica with the fewest calls in flight, if one has capacity
         or  the queue, in order of arrival --> the first suitable replica with capacity

`Router` has these rules, without processes, waiting or clocks, and independent of a call's work;
`dispatch` does the waiting. `membership` decides how many replicas there are.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, TypeVar

from composer_mesh.configs.supervision import SupervisionConfig
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


class ReplicaState(Enum):
    """Lifecycle state of a replica.

    READY takes every call; DRAINING only calls pinned to it, such as those of its sessions; the
    others none.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(eq=False)
class Replica:
    """One process of a service and its calls in flight.

    `tied` counts its sessions that cannot move; `generation` counts the processes that have had
    this slot; `received` are the set-up calls it has received, `caught_up` is the description that
    the service's own catch-up returned; `host` is the name of its host, None on the controller's
    machine. A call is in flight until its answer, its deadline or the replica's end, also after its
    caller was cancelled.
    """

    name: str
    state: ReplicaState = ReplicaState.STARTING
    outstanding: int = 0
    calls: int = 0
    sessions: int = 0
    tied: int = 0
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
    def open(self) -> bool:
        """Whether it takes every call."""
        return self.state is ReplicaState.READY

    @property
    def serving(self) -> bool:
        """Whether it takes the calls that are pinned to it."""
        return self.state in (ReplicaState.READY, ReplicaState.DRAINING)

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
class RestartRules:
    """At most `restarts` within any `window_s`, each after a wait that doubles from `backoff_s`."""

    restarts: int
    window_s: float = 300.0
    backoff_s: float = 0.5
    backoff_max_s: float = 15.0
    seed: int = 0
    forgives: bool = False
    """Whether a replacement that serves ends the count: where callers bound what kills them."""

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}, but cannot be below 0: pass 0 or more")
        for name in ("window_s", "backoff_s", "backoff_max_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name):g}: pass seconds above 0")

    @classmethod
    def of(cls, config: SupervisionConfig, seed: int) -> RestartRules:
        """Return the rules of a run."""
        return cls(config.restarts, config.window_s, config.backoff_s, config.backoff_max_s, seed)


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


@dataclass(eq=False)
class Ticket:
    """A call's place in the queue; a retry keeps its number, and so its place.

    `pin` is the only target that may take it; `tried` are targets on which it failed.
    """

    number: int
    pin: Replica | None = None
    tried: tuple[Replica, ...] = ()


class Router:
    """The targets of a service and the queue of waiting calls.

    Call `grants` after every change of a target, so that no call waits while there is capacity; a
    later call therefore never overtakes a waiting one.
    """

    def __init__(self, max_outstanding: int, queue: int) -> None:
        self.max_outstanding = max_outstanding
        self.queue = queue
        self.targets: list[Replica] = []
        self.coming = 0
        self._numbers = count()
        self._line: list[Ticket] = []

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return len(self._line)

    @property
    def full(self) -> bool:
        """Whether the queue takes no new call."""
        return self.waiting >= self.queue

    @property
    def may_find_target(self) -> bool:
        """Whether a call without a pin can expect a target."""
        return self.coming > 0 or any(target.open for target in self.targets)

    def ticket(self) -> Ticket:
        """Return a ticket with the next number."""
        return Ticket(next(self._numbers))

    def take(self, ticket: Ticket) -> Replica | None:
        """Assign a call to a target now; return None if it has to wait."""
        candidates = self.targets if ticket.pin is None else [ticket.pin]
        fitting = [s for s in candidates if self._has_capacity(s) and self._may(ticket, s)]
        target = min(fitting, key=lambda target: (target.outstanding, target.calls), default=None)
        if target is not None:
            self.occupy(target)
        return target

    def occupy(self, target: Replica) -> None:
        """Count a call that starts, also one that bypasses the capacity check."""
        target.outstanding += 1
        target.calls += 1

    def free(self, target: Replica) -> None:
        """Count a call that has ended."""
        target.outstanding -= 1

    def join(self, ticket: Ticket) -> None:
        """Queue a ticket, ordered by its number: retries keep their place."""
        insort(self._line, ticket, key=lambda one: one.number)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket from the queue; does nothing if it is not queued."""
        with suppress(ValueError):
            self._line.remove(ticket)

    def grants(self, targets: list[Replica] | None = None) -> list[tuple[Ticket, Replica]]:
        """Assign queued calls to these targets (or all), as far as they have capacity."""
        found = []
        for target in list(self.targets if targets is None else targets):
            while self._has_capacity(target) and (ticket := self._first_for(target)):
                self.leave(ticket)
                self.occupy(target)
                found.append((ticket, target))
        return found

    def orphans(self) -> list[Ticket]:
        """Remove and return the tickets that no target can serve any more."""
        lost = [one for one in self._line if not self._may_be_served(one)]
        self._line = [one for one in self._line if self._may_be_served(one)]
        return lost

    def remove_all(self) -> list[Ticket]:
        """Remove and return all queued tickets."""
        line, self._line = self._line, []
        return line

    def for_session(self) -> Replica | None:
        """Return the target for a new session: the one with the fewest sessions."""
        targets = [target for target in self.targets if target.open]
        return min(targets, key=lambda s: (s.sessions, s.outstanding, s.calls), default=None)

    def _has_capacity(self, target: Replica) -> bool:
        return target.serving and target.outstanding < self.max_outstanding

    def _may(self, ticket: Ticket, target: Replica) -> bool:
        """Whether a ticket may go to a target; to a tried one only if no other is open."""
        if ticket.pin is not None:
            return ticket.pin is target
        return target.open and (
            target not in ticket.tried or all(s in ticket.tried for s in self.targets if s.open)
        )

    def _may_be_served(self, ticket: Ticket) -> bool:
        return self.may_find_target if ticket.pin is None else ticket.pin.serving

    def _first_for(self, target: Replica) -> Ticket | None:
        return next((one for one in self._line if self._may(one, target)), None)


def to_retire(targets: list[Replica], count: int) -> list[Replica]:
    """Return the targets to retire: dead ones, then the least bound and busy, then the latest."""
    busy = [
        ((s.serving, s.tied, s.sessions, s.outstanding, -place), s)
        for place, s in enumerate(targets)
    ]
    return [target for _, target in sorted(busy, key=lambda pair: pair[0])[:count]]
