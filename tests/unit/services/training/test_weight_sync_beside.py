"""A round of weights beside a step: when the step may begin, and who is waited for before it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fake_host import FakeHost, turns
from fake_teachers import FakeActor, Log, Ring, config, weights
from healing_service import Events, healing

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.services.service import Service
from composer_mesh.services.training.step import MeshWeightSync
from composer_mesh.services.training.teaching import SdpoTeachers


class HoldingTrainer(FakeActor):
    """A rank that publishes the version it was told to hold; its gates block either."""

    version = 0

    async def hold(self) -> int:
        await self.pass_gate("hold")
        self.version += 1
        self.log.append(("hold", self.name))
        return self.version

    async def publish(self) -> WeightsHandle:
        await self.pass_gate("publish")
        self.log.append(("publish", self.name))
        return weights(self.version)


class Round:
    """Two ranks, two generators and, where asked, one teacher, around the real weight sync."""

    def __init__(self, generators: Service, host: FakeHost, teachers: Ring | None = None) -> None:
        self.log: Log = [] if teachers is None else teachers.log
        self.host = host
        self.ranks = [HoldingTrainer(f"trainer-{rank}", self.log) for rank in range(2)]
        own: SdpoTeachers | None = None if teachers is None else teachers.sdpo
        ranks = cast(list[SpawnedActor], self.ranks)
        self.weights = MeshWeightSync(lambda: ranks, generators, own, 5)

    def on_snapshot(self) -> None:
        self.log.append(("may train",))

    def kinds(self) -> list[str]:
        return [entry[0] for entry in self.log]

    def let_no_generator_pull(self) -> asyncio.Event:
        gate = asyncio.Event()
        for actor in self.host.started:
            actor.slow = gate
        return gate


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


async def generators(host: FakeHost) -> Service:
    events: Events = []
    host.answer = lambda endpoint, args: args[0].version if endpoint == "pull" else None
    return await healing(host, events, 2)


async def test_a_step_may_begin_when_every_rank_holds_the_version_and_before_it_is_copied(
    host: FakeHost,
) -> None:
    one = Round(await generators(host), host)
    slow_rank, copying = one.ranks[1].block("hold"), one.ranks[0].block("publish")
    syncing = asyncio.create_task(one.weights.sync(one.on_snapshot))
    await turns()
    assert one.kinds() == ["hold"]
    slow_rank.set()
    await turns()
    assert one.kinds() == ["hold", "hold", "may train", "publish"]
    assert not syncing.done()
    copying.set()
    assert await syncing == 1
    assert one.kinds().count("may train") == 1


async def test_nothing_is_held_where_no_step_comes_beside_it(host: FakeHost) -> None:
    one = Round(await generators(host), host)
    one.ranks[0].version = one.ranks[1].version = 1
    assert await one.weights.sync() == 1
    assert one.kinds() == ["publish", "publish"]


async def test_a_step_waits_for_the_pull_of_its_teachers_and_for_no_generator(
    host: FakeHost, build_config: Any
) -> None:
    ring = Ring(config(build_config))
    (teacher,) = await ring.begin()
    one = Round(await generators(host), host, ring)
    pulling, generating = teacher.block("pull"), one.let_no_generator_pull()
    syncing = asyncio.create_task(one.weights.sync(one.on_snapshot))
    await turns()
    assert "may train" not in one.kinds()
    pulling.set()
    await turns()
    assert one.log[-2:] == [("pull", "sdpo_teacher", 1), ("may train",)]
    assert not syncing.done()
    generating.set()
    assert await syncing == 1


async def test_a_teacher_that_dies_while_it_pulls_is_replaced_and_no_step_waits_for_it(
    host: FakeHost, build_config: Any
) -> None:
    ring = Ring(config(build_config))
    (teacher,) = await ring.begin()
    one = Round(await generators(host), host, ring)
    teacher.block("pull")
    syncing = asyncio.create_task(one.weights.sync(one.on_snapshot))
    await turns()
    teacher.die()
    assert await syncing == 1
    assert "may train" in one.kinds()
    await ring.settle()
    assert [event[0] for event in ring.events] == ["actor_restarted"]
    await ring.sdpo.close()


@pytest.mark.parametrize("stage", ["hold", "publish"])
async def test_a_rank_that_dies_in_it_ends_it_with_its_death(host: FakeHost, stage: str) -> None:
    one = Round(await generators(host), host)
    one.ranks[0].block(stage)
    syncing = asyncio.create_task(one.weights.sync(one.on_snapshot))
    await turns()
    one.ranks[0].die()
    with pytest.raises(ActorDied, match="trainer-0 died: killed"):
        await syncing
    assert ("may train" in one.kinds()) == (stage == "publish")
