"""The supervisor's rules, with faults made by hand; work that reads an actor's memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from composer_mesh.mesh.hosts.host import LocalHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, Supervisor, call
from composer_mesh.mesh.waiting import together

Events = list[tuple[str, str, str]]


@dataclass(frozen=True)
class Fault:
    """What Monarch hands to its hook."""

    mesh_name: str

    def report(self) -> str:
        return f"actor {self.mesh_name} failed:\n  gone"


async def deliver(supervisor: Supervisor, *mesh_names: str) -> None:
    """Report faults from a foreign thread, as Monarch does, and let the loop hear them."""
    for name in mesh_names:
        await asyncio.to_thread(supervisor._on_fault, Fault(name))
    await asyncio.sleep(0)


def recording() -> tuple[Supervisor, Events]:
    events: Events = []
    return Supervisor(lambda *event, **_: events.append(event)), events


async def test_a_fault_is_recorded_once_under_the_actors_name() -> None:
    supervisor, events = recording()
    death = supervisor.watch("generator-1-xyz", "generator-1")
    await deliver(supervisor, "logger-abc", "generator-1-xyz", "generator-1-xyz")
    assert events == [("actor_died", "generator-1", "gone")]
    for died in (await supervisor.failure, await death):
        assert isinstance(died, ActorDied)
        assert (died.actor, died.reason) == ("generator-1", "gone")


async def test_a_planned_stop_is_recorded_and_a_death_but_no_failure() -> None:
    supervisor, events = recording()
    death = supervisor.watch("trainer-xyz", "trainer")
    supervisor.expect_stop("trainer")
    await deliver(supervisor, "trainer-xyz")
    assert events == [("actor_stopped", "trainer", "gone")]
    assert not supervisor.failure.done()
    assert death.result().reason == "it was stopped"


async def test_guarded_work_ends_with_the_death_of_an_actor() -> None:
    supervisor, _ = recording()
    supervisor.watch("trainer-xyz", "trainer")
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    guarded = asyncio.ensure_future(supervisor.guard(work()))
    await asyncio.sleep(0)
    await deliver(supervisor, "trainer-xyz")
    with pytest.raises(ActorDied, match="trainer died: gone"):
        await guarded
    assert cancelled.is_set()


async def test_guarded_work_that_ends_gives_its_result_or_its_error() -> None:
    supervisor, _ = recording()

    async def work(error: bool) -> int:
        if error:
            raise KeyError("own")
        return 3

    assert await supervisor.guard(work(error=False)) == 3
    with pytest.raises(KeyError, match="own"):
        await supervisor.guard(work(error=True))


async def test_a_death_that_a_caller_hears_of_first_is_recorded_once() -> None:
    supervisor, events = recording()
    supervisor.watch("trainer-xyz", "trainer")

    async def calls() -> None:
        raise ActorDied("trainer", "gone")

    with pytest.raises(ActorDied):
        await supervisor.guard(calls())
    await deliver(supervisor, "trainer-xyz")
    assert events == [("actor_died", "trainer", "gone")]


async def test_work_that_runs_together_ends_together() -> None:
    ended: list[str] = []

    async def slow_to_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("left in peace")

    async def fails() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await together(slow_to_leave(), fails())
    assert ended == ["left in peace"]


async def test_work_that_runs_together_answers_in_order() -> None:
    async def answer(value: int) -> int:
        for _ in range(3 - value):
            await asyncio.sleep(0)
        return value

    assert await together(*map(answer, range(3))) == [0, 1, 2]


async def test_a_fault_that_its_owner_handles_is_recorded_and_no_failure_of_the_run() -> None:
    supervisor, events = recording()
    death = supervisor.watch("teacher-xyz", "teacher", FaultPolicy.OWNER)
    await deliver(supervisor, "teacher-xyz")
    assert events == [("actor_died", "teacher", "gone")]
    assert not supervisor.failure.done()
    assert (await death).args == ("teacher", "gone")


async def test_a_replacement_of_the_same_name_is_not_dead_with_the_first() -> None:
    supervisor, _ = recording()
    first = supervisor.watch("teacher-one", "teacher", FaultPolicy.OWNER)
    supervisor.expect_stop("teacher")
    second = supervisor.watch("teacher-two", "teacher", FaultPolicy.OWNER)
    await deliver(supervisor, "teacher-one")
    assert (first.done(), second.done()) == (True, False)
    supervisor.lost("teacher", "its process has ended")
    assert second.result().reason == "its process has ended"


@dataclass
class Reply:
    """What a call through Monarch gives back."""

    answer: asyncio.Future[Any]

    def as_asyncio(self) -> asyncio.Future[Any]:
        return self.answer


async def test_a_call_under_way_ends_with_the_death_of_its_actor() -> None:
    supervisor, _ = recording()
    death = supervisor.watch("teacher-xyz", "teacher", FaultPolicy.OWNER)
    never = Reply(asyncio.get_running_loop().create_future())
    calling = asyncio.create_task(call(never, 60, "teacher", "signal", death))
    await deliver(supervisor, "teacher-xyz")
    with pytest.raises(ActorDied, match="teacher died: gone"):
        await calling


async def test_an_answer_that_came_before_the_death_is_the_answer() -> None:
    supervisor, _ = recording()
    death = supervisor.watch("teacher-xyz", "teacher", FaultPolicy.OWNER)
    reply = Reply(asyncio.get_running_loop().create_future())
    reply.answer.set_result(3)
    await deliver(supervisor, "teacher-xyz")
    assert await call(reply, 60, "teacher", "signal", death) == 3


async def test_an_actor_is_alive_until_somebody_notices_its_end() -> None:
    supervisor, _ = recording()
    death = supervisor.watch("teacher-xyz", "teacher", FaultPolicy.OWNER)
    actor = SpawnedActor("teacher", "echo", None, 1, None, LocalHost(), death)
    assert actor.alive
    assert SpawnedActor("teacher", "echo", None, 1, None, LocalHost()).alive
    await deliver(supervisor, "teacher-xyz")
    assert not actor.alive


LONG_S = 60.0


def actor() -> SpawnedActor:
    death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
    nothing: Any = None
    return SpawnedActor("trainer", "trainer", nothing, 1, nothing, LocalHost(), death)


async def fail(error: Exception) -> None:
    raise error


async def test_work_that_goes_on_ends_with_the_actor() -> None:
    one = actor()
    working = asyncio.ensure_future(while_alive(one, asyncio.sleep(LONG_S)))
    await asyncio.sleep(0)
    assert one.death is not None
    one.death.set_result(ActorDied(one.name, "Killed(sig=9)"))
    with pytest.raises(ActorDied, match="trainer died"):
        await working


async def test_an_error_of_the_work_is_raised_at_once() -> None:
    one = actor()
    with pytest.raises(RuntimeError, match="torn"):
        await while_alive(one, fail(RuntimeError("torn")))
