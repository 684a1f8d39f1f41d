"""A service: several replicas of one actor behind one name, each in its own process.

    pool = await service.spawn(TeacherReplayActor, n=4)
    actions = await pool.query(state, n=3)

This is the public interface; docs/service.md documents its guarantees. `dispatch` sends calls by
the rules of `replicas`; `membership` starts and stops replicas. A service is independent of what
its actor's endpoints do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, record_nothing
from composer_mesh.mesh.supervision import FaultPolicy, Recorder, Supervisor
from composer_mesh.services.pool.dispatch import (
    AnyReplica,
    CallRules,
    Endpoints,
    NoReplicaLeft,
    OneReplica,
    default_name,
)
from composer_mesh.services.pool.membership import Membership
from composer_mesh.services.pool.process_placement import PlacementOf
from composer_mesh.services.pool.replicas import (
    Call,
    Env,
    Replica,
    ReplicaSpec,
    RestartRules,
    Router,
)
from composer_mesh.services.pool.sessions import PoolSession

DEADLINE_S = 120.0
ATTEMPTS = 3
MAX_OUTSTANDING = 256
QUEUE = 10_000
DRAIN_S = 30.0


class Service(Endpoints):
    """The replicas of one actor class; each endpoint call is routed to one replica.

    A call waits for capacity in order of arrival, and is retried on another replica where its own
    is lost. Bound its total time, including waiting, with `asyncio.timeout`.
    """

    def __init__(self, spec: ReplicaSpec, router: Router, rules: CallRules) -> None:
        super().__init__(spec.actor_class)
        self.name = spec.name
        self._actor_class = spec.actor_class
        self._rules = rules
        self._members = Membership(spec, router)
        self._dispatch = self._members.dispatch
        self._anywhere = AnyReplica(router, self._members.last_death)
        self._session_names: set[str] = set()
        self._session_numbers = count()

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that should serve, also dead ones; `on` takes their indexes."""
        return self._members.members

    def members(self) -> list[Replica]:
        """Return the replicas that have a process or will have one, by slot, leaving ones last."""
        return self._members.all_replicas

    @property
    def can_serve(self) -> bool:
        """Whether a call can expect a replica, now or once one has started."""
        return self._members.router.may_find_target

    def last_death(self) -> NoReplicaLeft:
        """Return the error with the reason why no replica is left."""
        return self._members.last_death()

    def reason(self, name: str) -> str:
        """Return why a replica is gone."""
        return self._members.reasons.get(name, "it was stopped")

    def lose(self, name: str, reason: str) -> None:
        """Count a replica as dead that a caller without the service found to be of no use.

        Its process is stopped, and replaced where dead ones are.
        """
        for replica in [one for one in self.replicas if one.name == name]:
            self._members.lose(replica, reason)

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a replica starts or stops serving."""
        self._members.dispatch.on_change(changed)

    @property
    def waiting(self) -> int:
        """Number of queued calls that no replica has taken yet."""
        return self._members.router.waiting

    @property
    def retried(self) -> int:
        """Number of attempts beyond the first, over all calls so far."""
        return self._dispatch.retried

    @property
    def restarts(self) -> int:
        """Number of replicas that have replaced dead ones so far."""
        return self._members.restarts

    def __len__(self) -> int:
        return len(self.replicas)

    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the least busy replica. Waits for its turn and the answer."""
        self.check(endpoint)
        return await self._dispatch.call(Call(endpoint, args, kwargs), self._rules, self._anywhere)

    async def on(self, index: int, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the replica with this index. Waits for its turn and the answer."""
        self.check(endpoint)
        if not 0 <= index < len(self):
            raise IndexError(f"replica {index} of {self.name}, which has 0 to {len(self) - 1}")
        only = OneReplica(self.replicas[index])
        return await self._dispatch.call(Call(endpoint, args, kwargs), self._rules, only)

    async def fanout(self, endpoint: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every replica, bypassing the queue; return the answers in order.

        Waits for all. Dead replicas are skipped where the service handles their deaths itself
        (`policy`), and raise otherwise.
        """
        self.check(endpoint)
        return await self._members.fanout(Call(endpoint, args, kwargs), self._rules.deadline_s)

    async def setup(self, endpoint: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every replica, and of each later replica before it gets other calls.

        Where dead replicas are replaced, a replica that fails at a set-up endpoint that it was set
        up by before is replaced too; the list is empty while all of them are being replaced.
        """
        self.check(endpoint)
        return await self._members.set_up(Call(endpoint, args, kwargs), self._rules.deadline_s)

    async def broadcast_weights(
        self, source: SpawnedActor, endpoint: str, /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Run a `setup` in which replicas read the memory of another actor.

        Raises `ActorDied` if that actor dies. Later replicas wait for the next setup of this kind
        if it is gone.
        """
        self.check(endpoint)
        call = Call(endpoint, args, kwargs, source)
        return await self._members.set_up(call, self._rules.deadline_s)

    def remember(self, endpoint: str, /, *args: Any, **kwargs: Any) -> None:
        """Set the call that later replicas get in place of the last `setup` of its endpoint."""
        self.check(endpoint)
        self._members.remember(Call(endpoint, args, kwargs))

    async def load(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `setup` with the actor's endpoint `load`."""
        return await self.setup("load", *args, **kwargs)

    def session(self, name: str | None = None, *, movable: bool = False) -> PoolSession:
        """Open calls that all go to one replica: `async with pool.session() as session:`."""
        name = name or f"{self.name}-session-{next(self._session_numbers)}"
        return PoolSession(
            name, self._actor_class, self._members, self._rules, movable, self._session_names
        )

    def options(
        self,
        *,
        deadline_s: float | None = None,
        attempts: int | None = None,
        retry_timeouts: bool | None = None,
        retry_errors: bool | None = None,
    ) -> Service:
        """Return a view of this service with other call rules; None keeps a rule.

        With `retry_timeouts` a call that missed its deadline is retried on another replica, with
        `retry_errors` one that raised an exception: it may then run twice.
        """
        given = {"deadline_s": deadline_s, "attempts": attempts}
        given |= {"retry_timeouts": retry_timeouts, "retry_errors": retry_errors}
        changes: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
        view = copy(self)
        view._rules = replace(self._rules, **changes)
        return view

    async def resize(self, n: int, drain_s: float = DRAIN_S) -> None:
        """Resize to `n` living replicas. Waits until new ones serve and old ones are gone.

        New replicas are set up before they serve, and dead ones are replaced; one whose replacement
        is under way counts as living. The least busy are removed: they get no new calls, and have
        `drain_s` for the calls and sessions that they have.
        """
        _at_least(1, n=n)
        await self._members.resize(n, drain_s, self._rules.deadline_s)

    def status(self) -> list[dict[str, Any]]:
        """Return one line of status per replica, from local state only. Never blocks."""
        return [replica.about() for replica in self._members.all_replicas]

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop every replica. Waits until their processes are gone.

        Waiting and later calls raise `ServiceClosed`, and so do those still running after
        `drain_s`.
        """
        await self._members.close(drain_s)

    async def _begin(self, n: int, load: tuple[Any, ...] | None) -> None:
        if load is not None:
            self.check("load")
            self._members.remember(Call("load", load))
        await self._members.grow(n, self._rules.deadline_s)

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def spawn(
    actor_class: type[MeshActor],
    *args: Any,
    n: int,
    load: tuple[Any, ...] | None = None,
    host: MeshHost | None = None,
    name: str | None = None,
    supervisor: Supervisor | None = None,
    deadline_s: float = DEADLINE_S,
    attempts: int = ATTEMPTS,
    max_outstanding: int = MAX_OUTSTANDING,
    queue: int = QUEUE,
    policy: FaultPolicy | None = None,
    env: Env | None = None,
    restart: RestartRules | None = None,
    record: Recorder = record_nothing,
    numbered: bool = True,
    placement: PlacementOf | None = None,
    **kwargs: Any,
) -> Service:
    """Start `n` replicas of an actor, each in its own process. Waits until all are ready.

    `args` and `kwargs` go to the actor's constructor, `load` to its endpoint of that name. Without
    `host` the replicas run on this process's default host. The service handles the death of a
    replica itself where calls have several `attempts` or `restart` is given; otherwise it ends the
    run, unless `policy` says otherwise.

    `env` is added to the environment of each process, or is a function of the replica's slot; a
    `placement`, called with the slot at each start, also gives the host and replaces `env`. With
    `restart`, dead replicas are replaced by its rules and reported to `record`; without, only a
    resize replaces them. Where replicas are not `numbered`, the first has the service's name.
    """
    _at_least(1, n=n, max_outstanding=max_outstanding)
    _at_least(0, queue=queue)
    rules = CallRules(deadline_s, attempts)
    host = host or default_host()
    host.supervisor = host.supervisor or supervisor
    forgiving = attempts > 1 or restart is not None
    policy = policy or (FaultPolicy.OWNER if forgiving else FaultPolicy.ESCALATE)
    name = name or default_name(actor_class)
    spec = ReplicaSpec(
        name,
        actor_class,
        host,
        args,
        kwargs,
        env,
        policy,
        deadline_s,
        restart,
        record,
        numbered,
        placement,
    )
    service = Service(spec, Router(max_outstanding, queue), rules)
    await service._begin(n, load)
    return service


def _at_least(bound: int, **values: int) -> None:
    for name, value in values.items():
        if value < bound:
            raise ValueError(f"{name} is {value}, but a service has {bound} or more: raise {name}")


_default_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, MeshHost] = WeakKeyDictionary()


def default_host() -> MeshHost:
    """Return this event loop's host for services spawned without one, created on first use."""
    loop = asyncio.get_running_loop()
    if loop not in _default_hosts:
        _default_hosts[loop] = MeshHost(Supervisor())
    return _default_hosts[loop]
