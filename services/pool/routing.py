"""Which replica takes which call: the rules, without processes, waiting or clocks.

    call --> the open seat with the fewest calls under way, where one has room
         or  the line, in the order of arrival --> the first seat with room that it may take

A seat is a replica as these rules see it. Nothing here knows what a call does, or wakes anybody.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Generic, TypeVar


class ReplicaState(Enum):
    """Where a replica is in its life.

    READY takes every call; DRAINING only the calls of what is bound to it; the others none.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(eq=False)
class RoutingTarget:
    """A replica as routing sees it; `tied` are those of its sessions that cannot move."""

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
        """Whether it takes the calls of what is bound to it."""
        return self.state in (ReplicaState.READY, ReplicaState.DRAINING)


S = TypeVar("S", bound=RoutingTarget)


@dataclass(eq=False)
class Ticket(Generic[S]):
    """One call's turn: it keeps its number, and so its turn, when it has to be made again.

    `pin` is the only seat that may take it; `tried` are seats that had it in vain.
    """

    number: int
    pin: S | None = None
    tried: tuple[S, ...] = ()


class Router(Generic[S]):
    """The seats of a service and the line before them.

    Whoever changes a seat calls `grants` afterwards, so that nobody waits where there is room; a
    call that comes later therefore never overtakes one that waits.
    """

    def __init__(self, max_outstanding: int, queue: int) -> None:
        self.max_outstanding = max_outstanding
        self.queue = queue
        self.targets: list[S] = []
        self.coming = 0
        self._numbers = count()
        self._lines: dict[S | None, list[Ticket[S]]] = {}

    @property
    def waiting(self) -> int:
        """Calls in the line."""
        return sum(map(len, self._lines.values()))

    @property
    def full(self) -> bool:
        """Whether the line takes no new call."""
        return self.waiting >= self.queue

    @property
    def hopeful(self) -> bool:
        """Whether a call that any replica may take can expect one."""
        return self.coming > 0 or any(target.open for target in self.targets)

    def ticket(self) -> Ticket[S]:
        """The next number."""
        return Ticket(next(self._numbers))

    def take(self, ticket: Ticket[S]) -> S | None:
        """The seat that takes this call now; None where it has to wait."""
        candidates = self.targets if ticket.pin is None else [ticket.pin]
        fitting = [s for s in candidates if self._has_capacity(s) and self._may(ticket, s)]
        target = min(fitting, key=lambda target: (target.outstanding, target.calls), default=None)
        if target is not None:
            self.occupy(target)
        return target

    def occupy(self, target: S) -> None:
        """Count a call that begins, also one that did not ask for room."""
        target.outstanding += 1
        target.calls += 1

    def free(self, target: S) -> None:
        """Count a call that has ended."""
        target.outstanding -= 1

    def join(self, ticket: Ticket[S]) -> None:
        """Stand in line; one that was here before stands before those that came after it."""
        insort(self._lines.setdefault(ticket.pin, []), ticket, key=lambda one: one.number)

    def leave(self, ticket: Ticket[S]) -> None:
        """Go out of the line; nothing happens where it does not stand in it."""
        line = self._lines.get(ticket.pin, [])
        if ticket in line:
            line.remove(ticket)
        if not line:
            self._lines.pop(ticket.pin, None)

    def grants(self, targets: list[S] | None = None) -> list[tuple[Ticket[S], S]]:
        """Who of the line goes where, now that these seats (or all) may have room."""
        found = []
        for target in list(self.targets if targets is None else targets):
            while self._has_capacity(target) and (ticket := self._first_for(target)):
                self.leave(ticket)
                self.occupy(target)
                found.append((ticket, target))
        return found

    def orphans(self) -> list[Ticket[S]]:
        """Those that wait in vain, taken out of the line."""
        pins = [pin for pin in self._lines if not (self.hopeful if pin is None else pin.serving)]
        return [ticket for pin in pins for ticket in self._lines.pop(pin)]

    def everybody(self) -> list[Ticket[S]]:
        """All that wait, taken out of the line."""
        lines, self._lines = self._lines, {}
        return [ticket for line in lines.values() for ticket in line]

    def for_session(self) -> S | None:
        """The seat for a new session: the one with the fewest."""
        targets = [target for target in self.targets if target.open]
        return min(targets, key=lambda s: (s.sessions, s.outstanding, s.calls), default=None)

    def _has_capacity(self, target: S) -> bool:
        return target.serving and target.outstanding < self.max_outstanding

    def _may(self, ticket: Ticket[S], target: S) -> bool:
        """A tried seat gets a call again only where there is no other."""
        if ticket.pin is not None:
            return ticket.pin is target
        if target not in ticket.tried:
            return target.open
        return target.open and all(s in ticket.tried for s in self.targets if s.open)

    def _first_for(self, target: S) -> Ticket[S] | None:
        bound = self._lines.get(target, [])[:1]
        anybody = (one for one in self._lines.get(None, []) if self._may(one, target))
        first = next(anybody, None)
        heads = bound if first is None else [*bound, first]
        return min(heads, key=lambda one: one.number, default=None)


def to_retire(targets: list[S], count: int) -> list[S]:
    """The seats to give up: the dead, then the least bound and least busy, of equals the latest."""
    busy = [
        ((s.serving, s.tied, s.sessions, s.outstanding, -place), s)
        for place, s in enumerate(targets)
    ]
    return [target for _, target in sorted(busy, key=lambda pair: pair[0])[:count]]
