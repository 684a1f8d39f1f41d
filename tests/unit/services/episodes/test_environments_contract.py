"""Every implementation of the port `Environments` keeps its contract: the fake, and a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from controller_world import World
from in_process_calls import peers, update

from composer_mesh.actors.rollout_workers.peers import PeerEnvironments
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Environments
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

A, B = "train-000000-000", "train-000000-001"


class Harness:
    """Environments of the toolbox on two replicas; `kill` ends the one that a session is on."""

    def __init__(self, port: Environments, task: ToolboxTask, kill: Callable[[str], None]) -> None:
        self.port, self.task, self.kill = port, task, kill
        self.episode = task.episode("train", 0)

    def own_session(self) -> SyncSession:
        """The same episode, played by the task itself."""
        return SyncSession(self.task, self.episode)

    async def play(self, session_id: str, own: SyncSession) -> None:
        """Take a turn in the port's session and in the task's own, with the same result."""
        text = self.task.expert(own.messages)
        assert await self.port.step(session_id, text) == own.step(text)


def of_the_controller(task: ToolboxTask, tokenizer: Any, _: Any) -> Harness:
    world = World(task, ChatFormat(tokenizer, task.tools))
    return Harness(world, task, world.kill)


async def over_actors(
    task: ToolboxTask, environment_actor: Callable[[], Any], build_config: Any
) -> Harness:
    actors = {f"environment-{n}": environment_actor() for n in range(2)}
    for actor in actors.values():
        await own_endpoint(actor, "load")(build_config())
    connections = peers(actors)
    port = PeerEnvironments(connections, 120.0)

    def kill(_: str) -> None:
        home = next((name for name, one in actors.items() if one.in_use()), "environment-0")
        del actors[home]
        update(connections, actors)

    return Harness(port, task, kill)


@pytest.fixture(params=["of the controller's world", "PeerEnvironments"])
async def harness(
    request: Any,
    tokenizer: Any,
    toolbox: ToolboxTask,
    build_config: Any,
    environment_actor: Callable[[], Any],
) -> Harness:
    if request.param == "PeerEnvironments":
        return await over_actors(toolbox, environment_actor, build_config)
    return of_the_controller(toolbox, tokenizer, build_config)


async def test_a_session_is_the_tasks_own_from_its_opening_to_its_end(harness: Harness) -> None:
    own = harness.own_session()
    assert await harness.port.begin(A, harness.episode) == own.messages
    await harness.play(A, own)
    assert await harness.port.finish(A) == own.outcome()


async def test_sessions_of_one_episode_know_nothing_of_each_other(harness: Harness) -> None:
    first, second = harness.own_session(), harness.own_session()
    await asyncio.gather(*(harness.port.begin(name, harness.episode) for name in (A, B)))
    await harness.play(A, first)
    assert await harness.port.finish(B) == second.outcome()
    assert await harness.port.finish(A) == first.outcome()


async def test_a_finished_session_takes_no_step(harness: Harness) -> None:
    await harness.port.begin(A, harness.episode)
    await harness.port.finish(A)
    with pytest.raises((KeyError, SessionLost)):
        await harness.port.step(A, "text")


async def test_a_session_may_be_abandoned_twice_or_unknown_and_another_attempt_begins(
    harness: Harness,
) -> None:
    own = harness.own_session()
    await harness.port.begin(A, harness.episode)
    for name in (A, A, B):
        harness.port.abandon(name)
    again = f"{A}.2"
    assert await harness.port.begin(again, harness.episode) == own.messages
    await harness.play(again, own)


async def test_a_session_is_lost_with_its_replica_and_another_attempt_begins_elsewhere(
    harness: Harness,
) -> None:
    own = harness.own_session()
    await harness.port.begin(A, harness.episode)
    harness.kill(A)
    for call in (harness.port.step(A, "text"), harness.port.finish(A)):
        with pytest.raises(SessionLost, match=A):
            await call
    harness.port.abandon(A)
    again = f"{A}.2"
    assert await harness.port.begin(again, harness.episode) == own.messages
    await harness.play(again, own)


async def test_a_call_under_way_ends_with_its_replica(harness: Harness) -> None:
    await harness.port.begin(A, harness.episode)
    stepping = asyncio.ensure_future(harness.port.step(A, "text"))
    harness.kill(A)
    with pytest.raises(SessionLost, match=A):
        await stepping
