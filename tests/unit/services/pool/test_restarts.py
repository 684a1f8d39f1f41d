"""When something is started again: backoff, budget, and the same error twice.

Replacement of a slot's replica: its name, how it catches up, and who waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_host import FakeHost, Worker, turns
from healing_service import AT_ONCE, Events
from hypothesis import example, given
from hypothesis import strategies as st

from composer_mesh.actors.provider.errors import ProviderServerError
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.configs.user_code import CustomFunctionError
from composer_mesh.mesh.failures import (
    FailureClass,
    cause_of,
    classify,
    error_key,
    states_its_cause,
)
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, RemoteError
from composer_mesh.mesh.weights.manifest import PullAbandoned
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.pool.membership import Membership
from composer_mesh.services.pool.replicas import Call, Replica, ReplicaSpec, RestartRules, Router
from composer_mesh.services.pool.restarts import RestartBudget, RestartsGivenUp, restart
from composer_mesh.tasks.errors import TaskCodeError, ToolServerLost, UnusableTask

RULES = RestartRules(restarts=3, window_s=10.0, backoff_s=1.0, backoff_max_s=3.0, seed=1)


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.integers(0, 4))
@example([1.9190476055650736, 5.0, 5.0], 1)  # now - moment is 10.0, and now - 10.0 is below moment
def test_no_window_ever_has_more_restarts_than_the_budget(gaps: list[float], most: int) -> None:
    rules = RestartRules(restarts=most, window_s=10.0, backoff_s=1.0, backoff_max_s=3.0)
    budget, now, granted = RestartBudget(rules, "slot"), 0.0, []
    for gap in gaps:
        now += gap
        if budget.take(now) is not None:
            granted.append(now)
        assert sum(now - moment < 10.0 for moment in granted) <= most


def test_the_wait_is_anything_up_to_a_bound_that_doubles_and_is_capped() -> None:
    budgets = [RestartBudget(RULES, f"slot-{n}") for n in range(200)]
    waits: list[list[Any]] = [[budget.take(0.0) for _ in range(3)] for budget in budgets]
    for place, bound in enumerate((1.0, 2.0, 3.0)):
        seen = [found[place] for found in waits]
        assert all(0.0 <= wait <= bound for wait in seen)
        assert min(seen) < 0.1 * bound
        assert max(seen) > 0.9 * bound


def test_after_a_quiet_window_the_wait_is_short_again() -> None:
    budget = RestartBudget(RULES, "slot")
    assert all(budget.take(0.0) is not None for _ in range(3))
    assert budget.take(9.9) is None
    later = budget.take(10.0)
    assert later is not None
    assert later <= 1.0


def test_waits_repeat_with_the_seed_and_differ_between_slots() -> None:
    def waits(seed: int, name: str) -> list[float | None]:
        budget = RestartBudget(RestartRules(3, seed=seed), name)
        return [budget.take(0.0) for _ in range(3)]

    assert waits(1, "a") == waits(1, "a")
    assert waits(1, "a") != waits(1, "b")
    assert waits(1, "a") != waits(2, "a")


@pytest.mark.parametrize(
    ("errors", "hopeless"),
    [
        ([ValueError("no key"), ValueError("no key")], True),
        ([ValueError("no key"), ValueError("no file")], False),
        ([ValueError("no key"), KeyError("no key")], False),
        ([ActorDied("w-0", "killed"), ActorDied("w-0", "killed")], False),
        ([MemoryError(), MemoryError()], False),
    ],
)
def test_only_an_equal_error_of_the_code_is_hopeless(errors: list[Any], hopeless: bool) -> None:
    budget = RestartBudget(RULES, "slot")
    assert [budget.repeats_its_error(error) for error in errors] == [False, hopeless]


async def test_a_start_that_fails_by_the_users_code_is_not_tried_again() -> None:
    starts = list[int]()

    async def start() -> None:
        starts.append(len(starts))
        raise TaskCodeError("loading task 'sums'", "sums.py:3", "KeyError: 'a'")

    with pytest.raises(RestartsGivenUp, match=r"sums\.py:3: KeyError.*another process would fail"):
        await restart(RestartBudget(AT_ONCE, "slot"), ActorDied("w-0", "killed"), start)
    assert starts == [0]


@pytest.mark.parametrize(
    ("error", "stated"),
    [
        (CustomFunctionError("users.loss", "", "it raised KeyError"), True),
        (UnusableTask("reward 'r' returned 'None'"), True),
        (ToolServerLost("files", "it has ended"), False),
        (KeyError("of ours"), False),
        (RemoteError("w-0", "work", "KeyError"), False),
        (ActorDied("w-0", "killed"), False),
    ],
)
def test_only_what_states_its_cause_is_certain_to_fail_again(
    error: Exception, stated: bool
) -> None:
    assert states_its_cause(pickle.loads(pickle.dumps(error))) is stated


def test_an_error_after_a_success_is_a_first_one_again() -> None:
    budget = RestartBudget(RULES, "slot")
    assert not budget.repeats_its_error(ValueError("no key"))
    budget.served()
    assert not budget.repeats_its_error(ValueError("no key"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"restarts": -1}, "restarts is -1, but cannot be below 0: pass 0 or more"),
        ({"restarts": 1, "window_s": 0.0}, "window_s is 0: pass seconds above 0"),
        ({"restarts": 1, "backoff_s": -2.0}, "backoff_s is -2: pass seconds above 0"),
    ],
)
def test_impossible_rules_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RestartRules(**settings)


def test_a_runs_rules_are_those_of_its_config() -> None:
    config = SupervisionConfig(restarts=7, window_s=60.0, backoff_s=0.2, backoff_max_s=9.0)
    assert RestartRules.of(config, 4) == RestartRules(7, 60.0, 0.2, 9.0, 4)


class BadEpisode(ValueError):
    """What an environment may say of an input."""

    failure_class = "data"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ActorDied("generator-0", "killed"), FailureClass.INFRASTRUCTURE),
        (DeadlineExceeded("generator-0", "generate", 3.0), FailureClass.INFRASTRUCTURE),
        (NoReplicaLeft("generator-0", "killed"), FailureClass.INFRASTRUCTURE),
        (RemoteError("generator-0", "generate", "Traceback"), FailureClass.CODE),
        (ProviderServerError("teacher", "it said 500"), FailureClass.PROVIDER),
        (BadEpisode("row 3 has no answer"), FailureClass.DATA),
        (MemoryError(), FailureClass.INFRASTRUCTURE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), FailureClass.INFRASTRUCTURE),
        (ConnectionResetError(), FailureClass.INFRASTRUCTURE),
        (OSError(errno.EADDRINUSE, "in use"), FailureClass.INFRASTRUCTURE),
        (OSError(errno.ENOENT, "no such file"), FailureClass.CODE),
        (KeyError("missing"), FailureClass.CODE),
    ],
)
def test_every_failure_has_a_class(error: Exception, wanted: FailureClass) -> None:
    assert classify(error) is wanted


def test_a_cause_is_one_line_and_a_key_is_bounded() -> None:
    assert cause_of(ValueError("one\n  two")) == "ValueError: one two"
    assert len(error_key(ValueError("x" * 100_000))) <= 500


@pytest.mark.parametrize("error", [NoReplicaLeft("w-0", "killed"), PullAbandoned(3)])
def test_new_errors_travel(error: Exception) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (type(error), str(error))


def test_a_replacement_that_serves_ends_the_count_where_the_rules_forgive() -> None:
    budget = RestartBudget(RestartRules(2, forgives=True), "slot")
    for _ in range(10):
        assert budget.take(0.0) is not None
        budget.served()
    assert [budget.take(0.0) is None for _ in range(3)] == [False, False, True]


DEADLINE_S = 5.0


class World:
    """A membership of two replicas with their own catch-up, on a fake host."""

    def __init__(self, restart: RestartRules | None = AT_ONCE, **options: Any) -> None:
        self.host, self.events = FakeHost(), cast(Events, [])
        self.catching_up: list[tuple[str, list[Call]]] = []
        options = {"catch_up": self.catch_up, "stable_names": True, **options}
        rest = {"deadline_s": DEADLINE_S, "restart": restart, "record": self.record, **options}
        spec = ReplicaSpec("w", Worker, cast(MeshHost, self.host), **rest)
        self.members = Membership(spec, Router(8, 8))

    def record(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.events.append((kind, actor, detail, fields))

    async def catch_up(self, replica: Replica, calls: Sequence[Call]) -> str:
        self.catching_up.append((replica.name, list(calls)))
        return "its average taken from w-1"

    async def begin(self) -> None:
        await self.members.grow(2, DEADLINE_S)
        await self.members.set_up(Call("load", ("policy",)), DEADLINE_S)
        await self.members.set_up(Call("pull", (7,)), DEADLINE_S)
        self.catching_up.clear()

    async def replaced(self, slot: int) -> None:
        replacing = self.members.replacement(slot)
        assert replacing is not None
        await asyncio.wait([replacing])


async def test_a_replacement_with_a_stable_name_has_the_name_of_the_dead() -> None:
    world = World()
    await world.begin()
    world.host["w-0"].die()
    await world.replaced(0)
    assert [replica.name for replica in world.members.members] == ["w-0", "w-1"]
    assert [actor.name for actor in world.host.started] == ["w-0", "w-1", "w-0"]
    assert world.members.members[0].actor is cast(Any, world.host.started[2])


async def test_a_service_catches_its_replacements_up_in_its_own_way_after_their_load() -> None:
    world = World()
    await world.begin()
    world.host["w-0"].die()
    await world.replaced(0)
    assert world.host.started[2].heard == [("load", "policy")]
    assert world.catching_up == [("w-0", [Call("pull", (7,))])]
    assert world.events[-1][:2] == ("actor_restarted", "w-0")
    assert world.events[-1][2] == "process 102, its average taken from w-1"


async def test_a_catch_up_that_fails_costs_a_restart_and_leaves_no_process() -> None:
    failures = [RuntimeError("its donor died")]

    async def fail_once(_: Replica, calls: Sequence[Call]) -> str:
        if calls and failures:
            raise failures.pop()
        return "caught up"

    world = World(catch_up=fail_once)
    await world.begin()
    world.host["w-0"].die()
    await world.replaced(0)
    assert len(world.host.started) == 4
    assert world.host.running == ["w-1", "w-0"]
    assert world.members.restarts == 1


async def test_a_death_that_is_known_has_a_replacement_before_the_loop_has_told_of_it() -> None:
    world = World()
    await world.begin()
    assert world.members.replacement(0) is None
    world.host["w-0"].die()
    replacing = world.members.replacement(0)  # no turn of the loop in between
    assert replacing is not None
    assert world.members.replacement(0) is replacing
    await asyncio.wait([replacing])
    assert world.members.replacement(0) is None


@pytest.mark.parametrize("restart", [None, RestartRules(restarts=0)])
async def test_a_slot_that_is_given_up_has_no_replacement(restart: RestartRules | None) -> None:
    world = World(restart)
    await world.begin()
    world.host["w-0"].die("out of memory")
    if (replacing := world.members.replacement(0)) is not None:
        await asyncio.wait([replacing])
    assert world.members.replacement(0) is None
    assert isinstance(world.members.last_death(), ActorDied)
    assert "out of memory" in str(world.members.last_death())


async def test_the_end_of_a_service_ends_a_replacement_that_somebody_waits_for() -> None:
    world = World()
    await world.begin()
    world.host.gate = asyncio.Event()
    world.host["w-0"].die()
    waiting = asyncio.create_task(world.replaced(0))
    await turns()
    assert not waiting.done()
    await world.members.close(0.0)
    await waiting
    assert world.host.running == []


async def test_a_replica_that_fails_at_its_first_read_of_weights_is_replaced() -> None:
    world = World()
    await world.members.grow(2, DEADLINE_S)
    world.host["w-0"].broken = RuntimeError("no memory")
    source: Any = SimpleNamespace(name="trainer", alive=True, death=None)
    pulling = world.members.set_up(Call("pull", (1,), source=source), DEADLINE_S)
    assert await pulling == ["w-1"]
    assert world.members.replacement(0) is not None
    await world.members.close(0.0)
