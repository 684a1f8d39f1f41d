"""Routing rules: which replica takes which call, without processes, waiting or clocks.

    call --> the open replica with the fewest calls in flight, if one has capacity
         or  the queue, in order of arrival --> the first suitable replica with capacity

A routing target is a replica as seen by these rules, which are independent of a call's work.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Generic, TypeVar


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
class RoutingTarget:
    """A replica as seen by routing; `tied` counts its sessions that cannot move."""

    name: str
    state: ReplicaState = ReplicaState.STARTING
    outstanding: int = 0
    calls: int = 0
    sessions: int = 0
    tied: int = 0

    @property
    def open(self) -> bool:
        """Whether it takes every call."""
        return self.state is ReplicaState.READY

    @property
    def serving(self) -> bool:
        """Whether it takes the calls that are pinned to it."""
        return self.state in (ReplicaState.READY, ReplicaState.DRAINING)


S = TypeVar("S", bound=RoutingTarget)


@dataclass(eq=False)
class Ticket(Generic[S]):
    """A call's place in the queue; a retry keeps its number, and so its place.

    `pin` is the only target that may take it; `tried` are targets on which it failed.
    """

    number: int
    pin: S | None = None
    tried: tuple[S, ...] = ()


class Router(Generic[S]):
    """The targets of a service and the queue of waiting calls.

    Call `grants` after every change of a target, so that no call waits while there is capacity; a
    later call therefore never overtakes a waiting one.
    """

    def __init__(self, max_outstanding: int, queue: int) -> None:
        self.max_outstanding = max_outstanding
        self.queue = queue
        self.targets: list[S] = []
        self.coming = 0
        self._numbers = count()
        self._line: list[Ticket[S]] = []

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

    def ticket(self) -> Ticket[S]:
        """Return a ticket with the next number."""
        return Ticket(next(self._numbers))

    def take(self, ticket: Ticket[S]) -> S | None:
        """Assign a call to a target now; return None if it has to wait."""
        candidates = self.targets if ticket.pin is None else [ticket.pin]
        fitting = [s for s in candidates if self._has_capacity(s) and self._may(ticket, s)]
        target = min(fitting, key=lambda target: (target.outstanding, target.calls), default=None)
        if target is not None:
            self.occupy(target)
        return target

    def occupy(self, target: S) -> None:
        """Count a call that starts, also one that bypasses the capacity check."""
        target.outstanding += 1
        target.calls += 1

    def free(self, target: S) -> None:
        """Count a call that has ended."""
        target.outstanding -= 1

    def join(self, ticket: Ticket[S]) -> None:
        """Queue a ticket, ordered by its number: retries keep their place."""
        insort(self._line, ticket, key=lambda one: one.number)

    def leave(self, ticket: Ticket[S]) -> None:
        """Remove a ticket from the queue; does nothing if it is not queued."""
        with suppress(ValueError):
            self._line.remove(ticket)

    def grants(self, targets: list[S] | None = None) -> list[tuple[Ticket[S], S]]:
        """Assign queued calls to these targets (or all), as far as they have capacity."""
        found = []
        for target in list(self.targets if targets is None else targets):
            while self._has_capacity(target) and (ticket := self._first_for(target)):
                self.leave(ticket)
                self.occupy(target)
                found.append((ticket, target))
        return found

    def orphans(self) -> list[Ticket[S]]:
        """Remove and return the tickets that no target can serve any more."""
        lost = [one for one in self._line if not self._may_be_served(one)]
        self._line = [one for one in self._line if self._may_be_served(one)]
        return lost

    def remove_all(self) -> list[Ticket[S]]:
        """Remove and return all queued tickets."""
        line, self._line = self._line, []
        return line

    def for_session(self) -> S | None:
        """Return the target for a new session: the one with the fewest sessions."""
        targets = [target for target in self.targets if target.open]
        return min(targets, key=lambda s: (s.sessions, s.outstanding, s.calls), default=None)

    def _has_capacity(self, target: S) -> bool:
        return target.serving and target.outstanding < self.max_outstanding

    def _may(self, ticket: Ticket[S], target: S) -> bool:
        """Whether a ticket may go to a target; to a tried one only if no other is open."""
        if ticket.pin is not None:
            return ticket.pin is target
        return target.open and (
            target not in ticket.tried or all(s in ticket.tried for s in self.targets if s.open)
        )

    def _may_be_served(self, ticket: Ticket[S]) -> bool:
        return self.may_find_target if ticket.pin is None else ticket.pin.serving

    def _first_for(self, target: S) -> Ticket[S] | None:
        return next((one for one in self._line if self._may(one, target)), None)


def to_retire(targets: list[S], count: int) -> list[S]:
    """Return the targets to retire: dead ones, then the least bound and busy, then the latest."""
    busy = [
        ((s.serving, s.tied, s.sessions, s.outstanding, -place), s)
        for place, s in enumerate(targets)
    ]
    return [target for _, target in sorted(busy, key=lambda pair: pair[0])[:count]]
