"""Every implementation of the port `Ranks` keeps its contract: the fakes, and `TrainerRanks`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trainer
import pytest
from fake_ranks import FakeHost
from ranks_contract import CLAIMS, Claim, RanksHarness
from slow_trainer import SlowWorld

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer
from composer_mesh.services.training.rank_processes import TrainerRanks

VERSION = 3
"""The version at which fake ranks load any checkpoint."""
Make = Callable[[Any], Any]


class FakeWorld:
    """The arithmetic ranks of `fake_trainer`, at version 3."""

    def __init__(self, world: fake_trainer.World) -> None:
        self.ranks, self.version = world, VERSION
        world.version = VERSION

    def kill_one(self) -> None:
        self.ranks.kill(ActorDied(self.ranks.names()[0], "killed"))

    def fail_next_start(self, error: Exception) -> None:
        self.ranks.fails["begin"] = [error]


class RanksOfFakes:
    """`TrainerRanks` over processes that are fakes; its second process can be refused."""

    version = VERSION

    def __init__(self, config: Any) -> None:
        self.host = FakeHost()
        self.refused: list[Exception] = []
        host: Any = self.host
        self.ranks = TrainerRanks(config, host, self._placement, news_s=0.0)

    def _placement(self, rank: int) -> ProcessPlacement:
        if rank and self.refused:
            raise self.refused.pop()
        return ProcessPlacement()

    def kill_one(self) -> None:
        self.host.named(self.ranks.names()[-1]).die()

    def fail_next_start(self, error: Exception) -> None:
        self.refused.append(error)


async def of_fakes(build_config: Any) -> RanksOfFakes:
    harness = RanksOfFakes(build_config(trainer={"ranks": 2}))
    await harness.ranks.start()
    await harness.ranks.load(Path("policy"))
    return harness


@pytest.fixture(params=["fake", "slow fake", "over fake processes"])
async def harness(request: Any, build_config: Any) -> RanksHarness:
    if request.param == "over fake processes":
        return await of_fakes(build_config)
    world = fake_trainer.World() if request.param == "fake" else SlowWorld(seed=1)
    return FakeWorld(world)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
async def test_the_ranks_of_a_trainer(claim: Claim, harness: RanksHarness, tmp_path: Path) -> None:
    await claim(harness, tmp_path)


async def test_a_trainer_that_cannot_be_restarted_ends_the_run_with_the_cause(
    build_config: Any, tmp_path: Path
) -> None:
    """Whoever meets the fault first, a step or the watch of the run, the cause is the same."""
    harness, world = await of_fakes(build_config), fake_trainer.World()
    config = build_config(supervision={"trainer_restarts": 2}, trainer={"checkpoint_every": 4})
    harness.refused = [OSError(28, "No space left on device") for _ in range(3)]
    trainer = FaultTolerantTrainer(
        config, harness.ranks, world, world, None, tmp_path, world.record, lambda *_: [], None
    )

    async def work() -> None:
        await asyncio.gather(trainer.train(fake_trainer.batch(0)), return_exceptions=True)
        await asyncio.Event().wait()

    world.fails["train"] = [ActorDied("trainer-1", "killed")]
    with pytest.raises(OSError, match="No space left on device"):
        await trainer.during(work())
    assert trainer.restarts == 2
