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
class Seat:
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

    @property
    def quiet(self) -> bool:
        """Whether it can leave without taking anything from anybody."""
        return self.outstanding == 0 and self.tied == 0


S = TypeVar("S", bound=Seat)


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
        self.seats: list[S] = []
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
        return self.coming > 0 or any(seat.open for seat in self.seats)

    def ticket(self) -> Ticket[S]:
        """The next number."""
        return Ticket(next(self._numbers))

    def take(self, ticket: Ticket[S]) -> S | None:
        """The seat that takes this call now; None where it has to wait."""
        candidates = self.seats if ticket.pin is None else [ticket.pin]
        fitting = [s for s in candidates if self._has_room(s) and self._may(ticket, s)]
        seat = min(fitting, key=lambda seat: (seat.outstanding, seat.calls), default=None)
        if seat is not None:
            self.occupy(seat)
        return seat

    def occupy(self, seat: S) -> None:
        """Count a call that begins, also one that did not ask for room."""
        seat.outstanding += 1
        seat.calls += 1

    def free(self, seat: S) -> None:
        """Count a call that has ended."""
        seat.outstanding -= 1

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

    def grants(self, seats: list[S] | None = None) -> list[tuple[Ticket[S], S]]:
        """Who of the line goes where, now that these seats (or all) may have room."""
        found = []
        for seat in list(self.seats if seats is None else seats):
            while self._has_room(seat) and (ticket := self._first_for(seat)):
                self.leave(ticket)
                self.occupy(seat)
                found.append((ticket, seat))
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
        seats = [seat for seat in self.seats if seat.open]
        return min(seats, key=lambda s: (s.sessions, s.outstanding, s.calls), default=None)

    def _has_room(self, seat: S) -> bool:
        return seat.serving and seat.outstanding < self.max_outstanding

    def _may(self, ticket: Ticket[S], seat: S) -> bool:
        """A tried seat gets a call again only where there is no other."""
        if ticket.pin is not None:
            return ticket.pin is seat
        if seat not in ticket.tried:
            return seat.open
        return seat.open and all(s in ticket.tried for s in self.seats if s.open)

    def _first_for(self, seat: S) -> Ticket[S] | None:
        bound = self._lines.get(seat, [])[:1]
        anybody = (one for one in self._lines.get(None, []) if self._may(one, seat))
        first = next(anybody, None)
        heads = bound if first is None else [*bound, first]
        return min(heads, key=lambda one: one.number, default=None)


def to_retire(seats: list[S], count: int) -> list[S]:
    """The seats to give up: the dead, then the least bound and least busy, of equals the latest."""
    busy = [
        ((s.serving, s.tied, s.sessions, s.outstanding, -place), s) for place, s in enumerate(seats)
    ]
    return [seat for _, seat in sorted(busy, key=lambda pair: pair[0])[:count]]
