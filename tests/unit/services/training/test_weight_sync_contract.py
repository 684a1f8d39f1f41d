"""Every implementation of the port `WeightSync` keeps its contract: the fakes and the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import controller_world
import fake_trainer
import pytest
from fake_host import FakeHost
from fake_store import Broken
from fake_teachers import FakeActor, weights
from healing_service import healing
from slow_trainer import SlowWorld

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.services.steps.ports import WeightSync
from composer_mesh.services.training.step import MeshWeightSync

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
