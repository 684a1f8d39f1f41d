"""A round of weights: every receiver that lives serves the version, and nobody waits in vain.

Every implementation of the port `WeightSync` keeps its contract: the fakes and the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import controller_world
import fake_trainer
import pytest
from fake_host import FakeHost, serve, turns
from fake_store import Broken
from fake_teachers import FakeActor, Log, weights
from healing_service import Events, healing, states, until_served
from slow_trainer import SlowWorld

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.weights.manifest import WeightsHandle, WeightsMismatch
from composer_mesh.services.service import Service
from composer_mesh.services.steps.ports import WeightSync
from composer_mesh.services.training.step import MeshWeightSync, StaleReceiver


class FakeTrainer(FakeActor):
    """Publishes the next version at each call."""

    version = 0

    async def hold(self) -> int:
        self.log.append(("hold", self.name))
        return self.version

    async def publish(self) -> WeightsHandle:
        self.log.append(("publish", self.name))
        self.version += 1
        return weights(self.version)


def round_of(trainer: FakeTrainer, pool: Service, *others: FakeTrainer) -> MeshWeightSync:
    ranks = [cast(SpawnedActor, one) for one in (trainer, *others)]
    return MeshWeightSync(lambda: ranks, pool, None, 5)


async def generators(host: FakeHost, events: Events, n: int = 2) -> Service:
    """Replicas that answer a pull with the version that they were given."""
    host.answer = lambda endpoint, args: args[0].version if endpoint == "pull" else None
    return await healing(host, events, n)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def events() -> Events:
    return []


def pulled(host: FakeHost, name: str) -> list[int]:
    return [args[0].version for endpoint, *args in host[name].heard if endpoint == "pull"]


async def test_every_receiver_is_asked_for_the_published_version(
    host: FakeHost, events: Events
) -> None:
    sync = round_of(FakeTrainer("trainer", []), await generators(host, events))
    assert [await sync.sync() for _ in range(2)] == [1, 2]
    assert [pulled(host, name) for name in ("w-0", "w-1")] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("beside", [False, True])
async def test_every_rank_publishes_its_part_and_holds_it_until_then(
    host: FakeHost, events: Events, beside: bool
) -> None:
    log: Log = []
    ranks = [FakeTrainer(f"trainer-{rank}", log) for rank in range(2)]
    told: list[str] = []
    sync = round_of(ranks[0], await generators(host, events), ranks[1])
    assert await sync.sync((lambda: told.append("train")) if beside else None) == 1
    asked = ("hold", "publish") if beside else ("publish",)
    assert log == [(what, rank.name) for what in asked for rank in ranks]
    assert told == ["train"] * beside
    assert pulled(host, "w-0") == [1]


async def test_ranks_that_publish_different_versions_are_no_version(
    host: FakeHost, events: Events
) -> None:
    ranks = [FakeTrainer(f"trainer-{rank}", []) for rank in range(2)]
    ranks[1].version = 1
    sync = round_of(ranks[0], await generators(host, events), ranks[1])
    with pytest.raises(WeightsMismatch, match="rank 1 published version 2 but rank 0 version 1"):
        await sync.sync()
    assert pulled(host, "w-0") == []


async def test_one_receiver_of_another_version_than_the_published_one_fails_the_round(
    host: FakeHost, events: Events
) -> None:
    pool, versions = await generators(host, events), iter([1, 7])
    host.answer = lambda endpoint, args: next(versions)
    with pytest.raises(StaleReceiver, match=r"published version 1 but receivers serve \[1, 7\]"):
        await round_of(FakeTrainer("trainer", []), pool).sync()


async def test_a_round_goes_on_without_a_receiver_that_is_lost_in_it(
    host: FakeHost, events: Events
) -> None:
    pool = await generators(host, events)
    sync = round_of(FakeTrainer("trainer", []), pool)
    await sync.sync()
    host["w-0"].broken = RuntimeError("injected")
    assert await sync.sync() == 2
    await until_served(pool, "w-0.2")
    assert pulled(host, "w-0.2") == [2]


async def test_a_round_that_meets_no_receiver_is_for_those_that_come(
    host: FakeHost, events: Events
) -> None:
    pool = await generators(host, events, n=1)
    sync = round_of(FakeTrainer("trainer", []), pool)
    await sync.sync()
    host.gate = asyncio.Event()
    host["w-0"].die()
    await turns()
    assert await sync.sync() == 2
    host.gate.set()
    await until_served(pool, "w-0.2")
    assert pulled(host, "w-0.2") == [2]


async def test_the_trainers_end_is_the_rounds_and_receivers_go_on(
    host: FakeHost, events: Events
) -> None:
    pool = await generators(host, events)
    trainer = FakeTrainer("trainer", [])
    sync = round_of(trainer, pool)
    await sync.sync()
    for actor in host.started:
        actor.slow = asyncio.Event()
    syncing = asyncio.ensure_future(sync.sync())
    await turns()
    trainer.die()
    with pytest.raises(ActorDied, match="trainer died: killed"):
        await syncing
    assert states(pool) == {"w-0": "ready", "w-1": "ready"}


async def test_without_restarts_a_receiver_that_fails_fails_the_round(host: FakeHost) -> None:
    pool = await serve(host, n=2)
    host["w-0"].broken = RuntimeError("injected")
    with pytest.raises(RuntimeError, match="injected"):
        await round_of(FakeTrainer("trainer", []), pool).sync()


VERSION = 3
DEATH = ActorDied("trainer", "killed")


class Harness:
    """A weight sync whose trainer is at version 3, and how its next round is made to fail."""

    def __init__(self, port: WeightSync, fail: Callable[[], None]) -> None:
        self.port, self.fail = port, fail


def faked(world: fake_trainer.World) -> Harness:
    world.version = VERSION
    return Harness(world, lambda: world.fails.update(sync=[DEATH]))


def fault_tolerant(build_config: Any, root: Path) -> Harness:
    """`FaultTolerantTrainer`, which gives a death up where no restart is allowed."""
    run = fake_trainer.Running(build_config, root, supervision={"trainer_restarts": 0})
    run.world.version = run.trainer._version = VERSION
    return Harness(run.trainer, lambda: run.world.fails.update(sync=[DEATH]))


def of_the_controller(build_config: Any, tokenizer: Any, toolbox: Any) -> Harness:
    world = controller_world.World(toolbox, tokenizer)
    world.trained = VERSION
    return Harness(world, lambda: setattr(world, "broken", "publish"))


class Rank(FakeActor):
    """A rank at version 3."""

    async def hold(self) -> int:
        return VERSION

    async def publish(self) -> WeightsHandle:
        return weights(VERSION)


async def over_fake_actors() -> Harness:
    host, rank = FakeHost(), Rank("trainer", [])
    host.answer = lambda endpoint, args: args[0].version if endpoint == "pull" else None
    ranks = cast(list[SpawnedActor], [rank])
    return Harness(MeshWeightSync(lambda: ranks, await healing(host, [], 2), None, 5), rank.die)


IMPLEMENTATIONS: dict[str, Callable[..., Harness | Awaitable[Harness]]] = {
    "fake": lambda *_: faked(fake_trainer.World()),
    "slow fake with teachers": lambda *_: faked(SlowWorld(seed=0)),
    "slow fake": lambda *_: faked(SlowWorld(seed=1)),
    "of the controller's world": lambda build, _, *rest: of_the_controller(build, *rest),
    "FaultTolerantTrainer": lambda build, root, *_: fault_tolerant(build, root),
    "MeshWeightSync": lambda *_: over_fake_actors(),
}


@pytest.fixture(params=IMPLEMENTATIONS)
async def harness(
    request: Any, build_config: Any, tmp_path: Path, tokenizer: Any, toolbox: Any
) -> Harness:
    made = IMPLEMENTATIONS[request.param](build_config, tmp_path, tokenizer, toolbox)
    return made if isinstance(made, Harness) else await made


async def test_a_sync_returns_the_version_that_the_trainer_has(harness: Harness) -> None:
    assert await harness.port.sync() == VERSION


async def test_the_next_step_is_allowed_once_before_a_sync_ends(harness: Harness) -> None:
    allowed: list[bool] = []
    syncing = asyncio.create_task(
        cast(Any, harness.port.sync(lambda: allowed.append(syncing.done())))
    )
    assert await syncing == VERSION
    assert allowed == [False]


async def test_a_sync_that_cannot_publish_fails_and_allows_no_step(harness: Harness) -> None:
    allowed: list[bool] = []
    harness.fail()
    with pytest.raises((ActorDied, Broken)):
        await harness.port.sync(lambda: allowed.append(True))
    assert allowed == []
