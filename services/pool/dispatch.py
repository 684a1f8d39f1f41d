"""Dispatches calls to replicas: waits for capacity, makes the call, and retries on another replica.

`replicas` has the rules and the processes; this module does the waiting. `Endpoints` are an actor's
endpoints as methods of a service or a session.

    MeshError
    ├── ServiceBusy     the queue is full; the call reached no replica
    ├── NoReplicaLeft   all replicas are gone and none is starting: an ActorDied, of the last one
    └── ServiceClosed   the service is closed, or was closed while the call waited or ran

`mesh.supervision` has those of the actors themselves, such as `SessionLost`. The death of a replica
whose call may not be retried elsewhere stays an `ActorDied`.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.failures import error_key
from composer_mesh.mesh.supervision import (
    ActorDied,
    DeadlineExceeded,
    MeshError,
    RemoteError,
)
from composer_mesh.services.pool.replicas import Call, Replica, Router, Ticket


class ServiceBusy(Worded, MeshError):
    """A call was refused immediately: the service, calls that wait, and the full queue's length."""

    message = (
        "{1} calls wait for a replica of {0}, but queue is {2}: ask again later, resize it, or "
        "spawn it with a longer queue"
    )


class NoReplicaLeft(ActorDied):
    """No replica can serve a call, and none is starting."""


class ServiceClosed(Worded, MeshError):
    """A call was made to a closed service, or did not end before it closed."""

    message = (
        "{0} is closed and runs no calls: spawn it anew, or close it with a drain_s that its calls "
        "need"
    )


class Endpoints(ABC):
    """Makes `proxy.endpoint(...)` equal to `proxy.call("endpoint", ...)` for each actor endpoint.

    Use `call` for an endpoint whose name is also an attribute of the proxy.
    """

    def __init__(self, actor_class: type[MeshActor]) -> None:
        self.endpoints = endpoints_of(actor_class)
        self._class_name = actor_class.__name__

    def __getattr__(self, endpoint: str) -> Callable[..., Awaitable[Any]]:
        if endpoint.startswith("_") or endpoint == "endpoints":
            raise AttributeError(
                endpoint
            )  # not set yet while unpickling or copying: avoids recursion
        self.check(endpoint)
        return partial(self.call, endpoint)

    def check(self, endpoint: str) -> None:
        """Raise AttributeError if the actor has no such endpoint."""
        if endpoint not in self.endpoints:
            raise AttributeError(
                f"{self._class_name} has no endpoint {endpoint!r}: "
                f"it has {', '.join(sorted(self.endpoints))}"
            )

    @abstractmethod
    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint by name."""


def endpoints_of(actor_class: type[MeshActor]) -> frozenset[str]:
    """Return the names of an actor class's endpoints."""
    names = (name for name in dir(actor_class) if not name.startswith("__"))
    return frozenset(
        name for name in names if isinstance(getattr(actor_class, name), EndpointProperty)
    )


def default_name(actor_class: type[MeshActor]) -> str:
    """Derive a service's name from its class: `TeacherReplayActor` gives `teacher-replay`."""
    stem = actor_class.__name__.removesuffix("Actor") or actor_class.__name__
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", stem).lower()


@dataclass(frozen=True)
class CallRules:
    """Deadline of each attempt of a call, and the number of attempts.

    A missed deadline is retried only with `retry_timeouts`, and an exception of the actor only with
    `retry_errors`, unless it raised the same one before.
    """

    deadline_s: float
    attempts: int = 1
    retry_timeouts: bool = False
    retry_errors: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(
                f"attempts is {self.attempts}, but a call is made once: pass 1 or more"
            )
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s is {self.deadline_s:g}: pass seconds above 0")


class Route(ABC):
    """Which replicas may take a call; `movable` if it may be retried on another replica."""

    movable = False

    @abstractmethod
    def pin(self) -> Replica | None:
        """Return the only possible replica, None where any will do; raise if none is left."""

    @abstractmethod
    def takes(self, replica: Replica) -> bool:
        """Whether the call still goes to this replica, which has capacity."""

    def lost(self, died: ActorDied) -> MeshError:
        """Return the error for the caller when the replica was lost and no other may take over."""
        return died


@dataclass(frozen=True)
class AnyReplica(Route):
    """A route to any replica."""

    router: Router
    last_death: Callable[[], ActorDied]
    movable = True

    def pin(self) -> Replica | None:
        if not self.router.may_find_target:
            raise self.last_death()
        return None

    def takes(self, replica: Replica) -> bool:
        return replica.serving


@dataclass(frozen=True)
class OneReplica(Route):
    """A route to one particular replica."""

    replica: Replica

    def pin(self) -> Replica | None:
        if not self.replica.serving:
            raise gone(self.replica)
        return self.replica

    def takes(self, replica: Replica) -> bool:
        return replica is self.replica


class Dispatch:
    """Runs the calls of one service; reports dead replicas to `lose(replica, reason)`."""

    def __init__(self, service: str, router: Router, lose: Callable[[Replica, str], None]) -> None:
        self.closed = False
        self.retried = 0
        self._service, self._router, self._lose = service, router, lose
        self._waiters: dict[Ticket, asyncio.Future[Replica | None]] = {}
        self._on_change: list[Callable[[], None]] = []

    async def call(self, call: Call, rules: CallRules, route: Route) -> Any:
        """Make a call, with retries on other replicas. Waits for its turn and its answer."""
        ticket = self._router.ticket()
        attempts = rules.attempts if route.movable else 1
        raised = ""
        while True:
            replica = await self._turn(ticket, route)
            try:
                return await self._run(replica, call, rules.deadline_s)
            except MeshError as error:
                if not _may_repeat(error, replica, rules):
                    raise
                if attempts == 1 and isinstance(error, ActorDied) and not replica.serving:
                    raise route.lost(error) from error
                if attempts == 1:
                    raise
            except Exception as error:
                if not rules.retry_errors or attempts == 1 or error_key(error) == raised:
                    raise
                raised = error_key(error)
            attempts -= 1
            self.retried += 1
            ticket.tried = (*ticket.tried, replica)

    async def direct(self, replica: Replica, call: Call, deadline_s: float) -> Any:
        """Call a replica bypassing the queue, also one that is still being set up."""
        self.check_open()
        if replica.ended:
            raise gone(replica)
        self._router.occupy(replica)
        return await self._run(replica, call, deadline_s)

    def check_open(self) -> None:
        """Raise `ServiceClosed` if the service is closed."""
        if self.closed:
            raise ServiceClosed(self._service)

    def changed(self) -> None:
        """Reassign capacity after a change of replicas; wake calls that none can serve."""
        self._grant(None)
        self._wake(self._router.orphans())
        for changed in self._on_change:
            changed()

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of replicas."""
        self._on_change.append(changed)

    def close(self) -> None:
        """Refuse every call from now on, including those that wait."""
        self.closed = True
        self._wake(self._router.remove_all())

    async def _turn(self, ticket: Ticket, route: Route) -> Replica:
        """Wait until a replica takes the call; it is then counted there."""
        admitted = bool(ticket.tried)
        while True:
            self.check_open()
            ticket.pin = route.pin()
            replica = self._router.take(ticket)
            if replica is None:
                if self._router.full and not admitted:
                    raise ServiceBusy(self._service, self._router.waiting, self._router.queue)
                replica, admitted = await self._wait(ticket), True
            if replica is not None:
                if route.takes(replica):
                    return replica
                self._free(replica)

    async def _wait(self, ticket: Ticket) -> Replica | None:
        """Join the queue; return None if the wait is futile and the caller must retry."""
        turn: asyncio.Future[Replica | None] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = turn
        self._router.join(ticket)
        try:
            return await turn
        except asyncio.CancelledError:
            self._router.leave(ticket)
            if turn.done() and not turn.cancelled() and (granted := turn.result()):
                self._free(granted)  # cancelled between the grant and its use
            raise
        finally:
            del self._waiters[ticket]

    def _grant(self, targets: list[Replica] | None) -> None:
        for ticket, replica in self._router.grants(targets):
            turn = self._waiters[ticket]
            if turn.cancelled():
                self._free(replica)
            else:
                turn.set_result(replica)

    def _wake(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if not self._waiters[ticket].cancelled():
                self._waiters[ticket].set_result(None)

    def _free(self, replica: Replica) -> None:
        self._router.free(replica)
        replica.stirred.set()
        self._grant([replica])

    async def _run(self, replica: Replica, call: Call, deadline_s: float) -> Any:
        """Run one attempt. It stays in flight, and counted, when the caller is cancelled."""
        attempt = asyncio.create_task(self._attempt(replica, call, deadline_s))
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replica.under_way.add(attempt)
        attempt.add_done_callback(partial(self._ended, replica, over))
        await over  # like asyncio.wait, in a tenth of the time
        if attempt.cancelled():  # its replica was stopped
            self.check_open()
            raise gone(replica)
        return attempt.result()

    async def _attempt(self, replica: Replica, call: Call, deadline_s: float) -> Any:
        try:
            return await replica.call(call, deadline_s)
        except ActorDied as died:
            if died.actor == replica.name and not _own(died):
                self._lose(replica, died.reason)
            raise

    def _ended(
        self, replica: Replica, over: asyncio.Future[None], attempt: asyncio.Task[Any]
    ) -> None:
        replica.under_way.discard(attempt)
        replica.failures += attempt.cancelled() or attempt.exception() is not None
        self._free(replica)
        if not over.done():
            over.set_result(None)


def gone(replica: Replica) -> ActorDied:
    """Return the error for a call to a replica that has ended."""
    return ActorDied(replica.name, replica.reason or f"it is {replica.state.value}")


def _may_repeat(error: MeshError, replica: Replica, rules: CallRules) -> bool:
    """Whether a mesh error allows a retry on another replica."""
    if _own(error):
        return rules.retry_errors
    if isinstance(error, DeadlineExceeded):
        return rules.retry_timeouts
    if isinstance(error, RemoteError):
        return rules.retry_errors
    return isinstance(error, ActorDied) and not replica.serving


def _own(error: Exception) -> bool:
    """Whether the actor's endpoint itself raised this error."""
    return isinstance(error.__cause__, RemoteError)
