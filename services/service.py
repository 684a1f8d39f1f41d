"""A service: several replicas of one actor behind one name, each in its own process.

    pool = await service.spawn(TeacherReplayActor, n=4)
    actions = await pool.query(state, n=3)

A call goes to the replica with the fewest calls under way. A dead replica ends the service's user
with `ActorDied`; what the endpoints mean is the actor's business.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from monarch._src.actor.endpoint import EndpointProperty

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost, SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, Supervisor

DEADLINE_S = 120.0


class ReplicaState(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass
class Replica:
    """One process of a service and the calls it has under way."""

    name: str
    state: ReplicaState = ReplicaState.STARTING
    actor: SpawnedActor | None = field(default=None, repr=False)
    outstanding: int = 0
    calls: int = 0
    reason: str = ""

    async def call(self, endpoint: str, args: Any, kwargs: Any, deadline_s: float) -> Any:
        """Call an endpoint of this replica, and know afterwards whether it still lives."""
        if self.actor is None or self.state is not ReplicaState.READY:
            raise ActorDied(self.name, self.reason or f"it is {self.state.value}")
        self.outstanding += 1
        self.calls += 1
        try:
            return await self.actor.call(endpoint, *args, deadline_s=deadline_s, **kwargs)
        except ActorDied as died:
            if died.actor == self.name:
                self.state, self.reason = ReplicaState.DEAD, died.reason
            raise
        finally:
            self.outstanding -= 1

    def about(self) -> dict[str, Any]:
        """One line of `Service.status`."""
        return {
            "name": self.name,
            "state": self.state.value,
            "pid": self.actor.pid if self.actor else None,
            "outstanding": self.outstanding,
            "calls": self.calls,
            "reason": self.reason,
        }


class Service:
    """The replicas of one actor class; the actor's endpoints, each routed to one replica."""

    def __init__(
        self,
        name: str,
        actor_class: type[MeshActor],
        replicas: list[Replica],
        host: MeshHost,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self.replicas = replicas
        self.deadline_s = deadline_s
        self.endpoints = endpoints_of(actor_class)
        self._class_name = actor_class.__name__
        self._host = host

    def __len__(self) -> int:
        return len(self.replicas)

    def __getattr__(self, endpoint: str) -> Callable[..., Awaitable[Any]]:
        self.__dict__[
            "endpoints"
        ]  # not yet set while unpickling or copying: KeyError, no recursion
        self._check(endpoint)

        async def routed(*args: Any, **kwargs: Any) -> Any:
            return await self._pick().call(endpoint, args, kwargs, self.deadline_s)

        return routed

    async def on(self, index: int, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the replica with this index. Waits for its answer."""
        self._check(endpoint)
        if not 0 <= index < len(self.replicas):
            raise IndexError(f"replica {index} of {self.name}, which has 0 to {len(self) - 1}")
        return await self.replicas[index].call(endpoint, args, kwargs, self.deadline_s)

    async def fanout(self, endpoint: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every replica. Waits for all answers, in the replicas' order."""
        self._check(endpoint)
        calls = [r.call(endpoint, args, kwargs, self.deadline_s) for r in self.replicas]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def status(self) -> list[dict[str, Any]]:
        """What each replica is doing, as far as this side knows. Waits for nothing."""
        return [replica.about() for replica in self.replicas]

    async def close(self) -> None:
        """Stop every replica. Waits until their processes are gone."""
        await asyncio.gather(*(self._stop(replica) for replica in self.replicas))

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _stop(self, replica: Replica) -> None:
        if replica.actor is not None and replica.state is not ReplicaState.STOPPED:
            replica.state = ReplicaState.STOPPED
            await self._host.stop(replica.actor)

    def _pick(self) -> Replica:
        ready = [replica for replica in self.replicas if replica.state is ReplicaState.READY]
        if not ready:
            first = self.replicas[0]
            raise ActorDied(first.name, first.reason or f"it is {first.state.value}")
        return min(ready, key=lambda replica: (replica.outstanding, replica.calls))

    def _check(self, endpoint: str) -> None:
        if endpoint not in self.endpoints:
            raise AttributeError(
                f"{self._class_name} has no endpoint {endpoint!r}: "
                f"it has {', '.join(sorted(self.endpoints))}"
            )


async def spawn(
    actor_class: type[MeshActor],
    *args: Any,
    n: int,
    host: MeshHost | None = None,
    name: str | None = None,
    supervisor: Supervisor | None = None,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Service:
    """Start `n` replicas of an actor, each in its own process. Waits until all of them answer.

    `args` and `kwargs` go to the actor's constructor. Without a host the replicas belong to the
    host that this process keeps for such services.
    """
    if n < 1:
        raise ValueError(f"n is {n}, but a service has at least one replica: pass n >= 1")
    host = host or default_host()
    host.supervisor = host.supervisor or supervisor
    name = name or default_name(actor_class)
    replicas = [Replica(f"{name}-{index}") for index in range(n)]
    service = Service(name, actor_class, replicas, host, deadline_s)
    try:
        await _start_all(replicas, actor_class, host, args, kwargs, env)
    except BaseException:
        await service.close()
        raise
    return service


async def _start_all(
    replicas: list[Replica],
    actor_class: type[MeshActor],
    host: MeshHost,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str] | None,
) -> None:
    async def start(replica: Replica) -> None:
        replica.actor = await host.spawn(replica.name, actor_class, *args, env=env, **kwargs)
        replica.state = ReplicaState.READY

    results = await asyncio.gather(*map(start, replicas), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


_default_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, MeshHost] = WeakKeyDictionary()


def default_host() -> MeshHost:
    """The host of the services that were spawned without one, made at its first use in a loop."""
    loop = asyncio.get_running_loop()
    if loop not in _default_hosts:
        _default_hosts[loop] = MeshHost(Supervisor())
    return _default_hosts[loop]


def endpoints_of(actor_class: type[MeshActor]) -> frozenset[str]:
    """The names of the endpoints of an actor class."""
    names = (name for name in dir(actor_class) if not name.startswith("__"))
    return frozenset(
        name for name in names if isinstance(getattr(actor_class, name), EndpointProperty)
    )


def default_name(actor_class: type[MeshActor]) -> str:
    """A service's name from its class: `TeacherReplayActor` gives `teacher-replay`."""
    stem = actor_class.__name__.removesuffix("Actor") or actor_class.__name__
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", stem).lower()
