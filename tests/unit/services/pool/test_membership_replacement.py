"""Replacement of a slot's replica: its name, how it catches up, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_host import FakeHost, Worker, turns
from healing_service import AT_ONCE, Events

from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.pool.membership import Membership
from composer_mesh.services.pool.replicas import Call, Replica, ReplicaSpec, RestartRules, Router

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
