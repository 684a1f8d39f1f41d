"""The rules of routing, by themselves: who is served next, and that nobody is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from composer_mesh.services.pool.replicas import (
    Replica,
    ReplicaState,
    Router,
    Ticket,
    to_retire,
)


def targets(*outstanding: int, **fields: int) -> list[Replica]:
    made = [
        Replica(f"w-{n}", ReplicaState.READY, calls, calls) for n, calls in enumerate(outstanding)
    ]
    for target in made:
        for name, value in fields.items():
            setattr(target, name, value)
    return made


def router(*outstanding: int, max_outstanding: int = 4, queue: int = 9) -> Router:
    made: Router = Router(max_outstanding, queue)
    made.targets = targets(*outstanding)
    return made


def pinned(made: Router, place: int) -> Ticket:
    ticket = made.ticket()
    ticket.pin = made.targets[place]
    return ticket


def test_a_call_goes_to_the_replica_with_the_fewest_under_way() -> None:
    made = router(2, 0, 1)
    made.targets[1].calls = 99
    taken = [made.take(made.ticket()) for _ in range(4)]
    assert [target.name for target in taken if target] == ["w-1", "w-2", "w-1", "w-0"]


def test_of_equals_the_one_with_the_fewest_calls_so_far_is_taken() -> None:
    made = router(1, 1, 1)
    made.targets[0].calls, made.targets[1].calls, made.targets[2].calls = 9, 3, 5
    assert made.take(made.ticket()) is made.targets[1]


@pytest.mark.parametrize("state", [state for state in ReplicaState if state.value != "ready"])
def test_a_replica_that_is_not_ready_gets_nothing_new(state: ReplicaState) -> None:
    made = router(0, 3)
    made.targets[0].state = state
    assert made.take(made.ticket()) is made.targets[1]
    assert made.for_session() is made.targets[1]
    assert made.take(made.ticket()) is None


def test_a_draining_replica_takes_what_is_bound_to_it_and_nothing_else() -> None:
    made = router(0, 4)
    made.targets[0].state = ReplicaState.DRAINING
    anybody, bound = made.ticket(), pinned(made, 0)
    assert made.take(anybody) is None
    assert made.take(bound) is made.targets[0]


def test_a_bound_call_waits_for_its_replica_while_another_has_capacity() -> None:
    made = router(4, 0)
    bound = pinned(made, 0)
    assert made.take(bound) is None
    made.join(bound)
    assert made.grants() == []
    made.free(made.targets[0])
    assert made.grants([made.targets[0]]) == [(bound, made.targets[0])]


def test_bound_and_unbound_waiters_of_a_replica_go_in_the_order_of_arrival() -> None:
    made = router(1, 1, max_outstanding=1)
    waiting = [made.ticket(), pinned(made, 0), pinned(made, 1), made.ticket(), pinned(made, 0)]
    for ticket in waiting:
        made.join(ticket)
    served = []
    for _ in range(4):
        made.free(made.targets[0])
        [(ticket, _)] = made.grants([made.targets[0]])
        served.append(ticket.number)
    assert served == [0, 1, 3, 4]
    assert made.waiting == 1


def test_a_call_that_comes_back_stands_before_those_that_came_after_it() -> None:
    made = router(1, max_outstanding=1)
    early, late = made.ticket(), made.ticket()
    made.join(late)
    made.join(early)
    made.free(made.targets[0])
    assert made.grants() == [(early, made.targets[0])]


def test_a_tried_replica_gets_a_call_again_only_where_there_is_no_other() -> None:
    made = router(0, 4)
    ticket = made.ticket()
    ticket.tried = (made.targets[0],)
    assert made.take(ticket) is None
    made.join(ticket)
    assert made.grants() == []
    made.targets[1].state = ReplicaState.DEAD
    assert made.grants() == [(ticket, made.targets[0])]


def test_the_line_is_full_at_its_bound_and_not_before() -> None:
    made = router(1, max_outstanding=1, queue=2)
    first, second = made.ticket(), pinned(made, 0)
    made.join(first)
    assert (made.waiting, made.full) == (1, False)
    made.join(second)
    assert (made.waiting, made.full) == (2, True)
    made.leave(first)
    made.leave(first)
    assert (made.waiting, made.full) == (1, False)


def test_those_who_wait_in_vain_are_found() -> None:
    made = router(4, 4)
    bound, anybody = pinned(made, 0), made.ticket()
    for ticket in (bound, anybody):
        made.join(ticket)
    assert made.orphans() == []
    made.targets[0].state = ReplicaState.DEAD
    assert made.orphans() == [bound]
    made.coming = 1
    made.targets[1].state = ReplicaState.STOPPED
    assert made.orphans() == []
    made.coming = 0
    assert made.orphans() == [anybody]
    assert made.waiting == 0


def test_a_session_goes_where_the_fewest_are() -> None:
    made = router(0, 3)
    made.targets[0].sessions = 1
    assert made.for_session() is made.targets[1]


def test_those_that_leave_are_the_least_bound_then_least_busy_then_latest() -> None:
    four = targets(0, 2, 1, 1)
    four[0].tied = four[0].sessions = 1
    assert [target.name for target in to_retire(four, 3)] == ["w-3", "w-2", "w-1"]
    assert to_retire(four, 0) == []


class AnyOrder(RuleBasedStateMachine):
    """Calls, ends, deaths and growth in any order; `waiting` and `running` are what must hold."""

    @initialize(size=st.integers(1, 4), outstanding=st.integers(1, 3))
    def start(self, size: int, outstanding: int) -> None:
        self.router = router(*[0] * size, max_outstanding=outstanding)
        self.everyone = list(self.router.targets)
        self.waiting: list[Ticket] = []
        self.running: list[tuple[Ticket, Replica]] = []

    @rule(pin=st.one_of(st.none(), st.integers(0, 9)))
    def call(self, pin: int | None) -> None:
        ticket = self.router.ticket()
        ticket.pin = None if pin is None else self.everyone[pin % len(self.everyone)]
        if target := self.router.take(ticket):
            assert all(other.pin is not ticket.pin for other in self.waiting), "overtaken"
            self.running.append((ticket, target))
        else:
            self.router.join(ticket)
            self.waiting.append(ticket)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 9))
    def end(self, place: int) -> None:
        self.router.free(self.running.pop(place % len(self.running))[1])
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 9))
    def give_up(self, place: int) -> None:
        self.router.leave(self.waiting.pop(place % len(self.waiting)))

    @rule(place=st.integers(0, 9), state=st.sampled_from(["draining", "dead"]))
    def decline(self, place: int, state: str) -> None:
        target = self.everyone[place % len(self.everyone)]
        if target.open or state == "dead":
            target.state = ReplicaState(state)
        self.settle()

    @rule()
    def grow(self) -> None:
        self.everyone.append(Replica(f"w-{len(self.everyone)}", ReplicaState.READY))
        self.router.targets.append(self.everyone[-1])
        self.settle()

    def settle(self) -> None:
        for ticket, target in self.router.grants():
            assert not any(o.pin is ticket.pin and o.number < ticket.number for o in self.waiting)
            self.waiting.remove(ticket)
            self.running.append((ticket, target))
        for ticket in self.router.orphans():
            self.waiting.remove(ticket)
            assert not (self.router.may_find_target if ticket.pin is None else ticket.pin.serving)

    @invariant()
    def no_replica_has_more_than_it_may(self) -> None:
        for target in self.everyone:
            count = sum(other is target for _, other in self.running)
            assert target.outstanding == count <= self.router.max_outstanding

    @invariant()
    def nobody_waits_below_the_bound(self) -> None:
        assert self.router.waiting == len(self.waiting)
        for ticket in self.waiting:
            targets = (
                [ticket.pin] if ticket.pin else [target for target in self.everyone if target.open]
            )
            assert all(target.serving for target in targets)
            assert all(target.outstanding == self.router.max_outstanding for target in targets)


TestAnyOrder = AnyOrder.TestCase
