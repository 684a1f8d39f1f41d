"""Every implementation of the ports `Step` and `Training` keeps its contract: fakes and real ones.

The real one is a trainer with a tiny model in this process; `procs/test_ranks_contract` shows the
same of a trainer in a process of its own.

Work on several ranks: none of them is late while another one, for which it waits, moves.

The port `CheckpointedTeachers` of training: the fake and `RestoredTeachers` keep its contract.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import fake_trainer
import pytest
from controller_world import World
from fake_stored_training import Trainer
from fake_teachers import PublishingRank, Ring, config, training
from fake_trainer import batch
from in_process_host import InProcessHost
from scripted_work import NOW_S, Worker, actor, moves, stands_still
from training_contract import (
    STEP_CLAIMS,
    TRAINING_CLAIMS,
    StepClaim,
    StepHarness,
    TrainingClaim,
    TrainingHarness,
    a_step_without_teacher_outputs_says_that_it_lacks_them,
)

from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.trainer import TrainReply
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.steps.ports import Training, WeightSync
from composer_mesh.services.training.checkpoint_writes import AverageLost, CheckpointedTeachers
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer
from composer_mesh.services.training.rank_processes import TrainerRanks
from composer_mesh.services.training.step import MeshTraining, MeshWeightSync, RestoredTeachers

NO_RESTART = {"supervision": {"trainer_restarts": 0}}


@pytest.fixture(scope="module")
def folder(build_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_policy(build_model(1), tokenizer, path)
    return path


class FakeSteps:
    """The arithmetic trainer."""

    def __init__(self) -> None:
        self.step = self.world = fake_trainer.World()

    async def version(self) -> int:
        return self.world.version

    async def serve(self) -> None:
        await self.world.follow()

    async def restart_from(self) -> None:
        await self.world.restart_from(None)
        await self.serve()

    async def kill(self) -> None:
        self.world.fails["train"] = [ActorDied("trainer", "killed")]


class OverFakeRanks:
    """`MeshTraining` over a rank and a teacher that are fakes."""

    def __init__(self, build_config: Any) -> None:
        self._config = config(build_config)

    async def restart_from(self) -> None:
        self._ring = Ring(self._config, ranks=[0])
        await self._ring.begin()
        self.step = training(self._ring, self._config)

    async def serve(self) -> None:
        await self._ring.settle()

    async def version(self) -> int:
        return self._ring.ranks[0].version

    async def kill(self) -> None:
        self._ring.ranks[0].die()


class OverRealRank:
    """`MeshTraining` over a real trainer in this process, without teachers of the mesh."""

    def __init__(self, settings: Config, folder: Path) -> None:
        self.ranks = TrainerRanks(
            settings, cast(MeshHost, InProcessHost()), lambda _: ProcessPlacement(), news_s=0.0
        )
        self.step = MeshTraining(settings, lambda: self.ranks.all, None)
        self._folder = folder

    async def restart_from(self) -> None:
        if self.ranks.all:
            await self.ranks.restart_from(None)
            return
        await self.ranks.start()
        await self.ranks.load(self._folder)

    async def serve(self) -> None:
        """The teacher in the trainer has its version."""

    async def version(self) -> int:
        return int(cast(Any, self.ranks.first).actor.policy_version)

    async def kill(self) -> None:
        cast(Any, self.ranks.first).die()


def real(build_config: Any, folder: Path, placement: str) -> OverRealRank:
    return OverRealRank(build_config(sdpo={"alpha": 0.5, "placement": placement}), folder)


STEPS: dict[str, Callable[[Any, Path], StepHarness]] = {
    "fake": lambda *_: FakeSteps(),
    "MeshTraining over fakes": lambda build, _: OverFakeRanks(build),
    "MeshTraining": lambda build, folder: real(build, folder, "inline"),
}
WITH_TEACHERS_OF_THE_MESH = STEPS | {
    "MeshTraining": lambda build, folder: real(build, folder, "mesh"),
}


@pytest.mark.parametrize("claim", STEP_CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("kind", STEPS)
async def test_a_step_of_a_trainer(
    kind: str, claim: StepClaim, build_config: Any, folder: Path
) -> None:
    harness = STEPS[kind](build_config, folder)
    await harness.restart_from()
    await claim(harness)


@pytest.mark.parametrize("kind", WITH_TEACHERS_OF_THE_MESH)
async def test_a_step_that_no_teacher_was_asked_for(
    kind: str, build_config: Any, folder: Path
) -> None:
    harness = WITH_TEACHERS_OF_THE_MESH[kind](build_config, folder)
    await harness.restart_from()
    await a_step_without_teacher_outputs_says_that_it_lacks_them(harness)


class Harness:
    """A trainer, its versions as its weight sync tells them, and how it fails."""

    def __init__(
        self, port: Training, version: Callable[[], Awaitable[int]], fail: Callable[[], object]
    ) -> None:
        self.training, self.version, self.fail = port, version, fail


def of_the_controller(toolbox: Any, tokenizer: Any) -> Harness:
    world = World(toolbox, ChatFormat(tokenizer, toolbox.tools))
    return Harness(world, _served(world), lambda: setattr(world, "broken", "train"))


def of_stored_steps() -> Harness:
    fake = Trainer()
    return Harness(
        fake, _served(fake), lambda: setattr(fake, "error", ActorDied("trainer", "killed"))
    )


def _served(weights: WeightSync) -> Callable[[], Awaitable[int]]:
    async def version() -> int:
        return await weights.sync()

    return version


def fault_tolerant(build_config: Any, root: Path) -> Harness:
    run = fake_trainer.Running(build_config, root, **NO_RESTART)

    async def version() -> int:
        return run.world.version

    dead = ActorDied("trainer", "killed")
    return Harness(run.trainer, version, lambda: run.world.fails.update(train=[dead]))


async def lasting_and_real(build_config: Any, root: Path, folder: Path) -> Harness:
    settings = build_config(**NO_RESTART, trainer={"checkpoint_every": 2})
    rank = OverRealRank(settings, folder)
    await rank.restart_from()
    weights = MeshWeightSync(lambda: rank.ranks.all, None, None, 5.0)
    trainer = FaultTolerantTrainer(
        *(settings, rank.ranks, rank.step, weights, None, root),
        *(lambda *_, **__: None, lambda *_: []),
    )
    return Harness(trainer, rank.version, cast(Any, rank.ranks.first).die)


TRAININGS: dict[str, Callable[..., Harness | Awaitable[Harness]]] = {
    "of the controller's world": lambda task, tokenizer, *_: of_the_controller(task, tokenizer),
    "of stored steps": lambda *_: of_stored_steps(),
    "FaultTolerantTrainer over fakes": lambda _, __, build, root, ___: fault_tolerant(build, root),
    "FaultTolerantTrainer": lambda _, __, *rest: lasting_and_real(*rest),
}


@pytest.fixture(params=TRAININGS)
async def trainer(
    request: Any, toolbox: Any, tokenizer: Any, build_config: Any, tmp_path: Path, folder: Path
) -> TrainingHarness:
    made = TRAININGS[request.param](toolbox, tokenizer, build_config, tmp_path, folder)
    return made if isinstance(made, Harness) else await made


@pytest.mark.parametrize("claim", TRAINING_CLAIMS, ids=lambda claim: claim.__name__)
async def test_training(claim: TrainingClaim, trainer: TrainingHarness) -> None:
    await claim(trainer)


def ranks_of(result: Any, slow: bool) -> list[Any]:
    """Two ranks, of which the second one moves if it is only `slow`, and ends last."""
    still = [stands_still() for _ in range(10)]
    moving = [moves() if slow else stands_still() for _ in range(40)]
    return [
        actor(Worker(reports, result), name=f"trainer-{rank}")
        for rank, reports in enumerate((still, moving))
    ]


def config_of(build_config: Any) -> Any:
    return build_config(run={"deadline_s": 1e-3}, trainer={"ranks": 2})


@pytest.mark.parametrize("slow", [True, False])
async def test_a_step_waits_for_a_slow_rank_and_not_for_ranks_that_all_stand_still(
    build_config: Any, slow: bool
) -> None:
    ranks = ranks_of(TrainReply({"loss/total": 1.0}, {}), slow)
    training = MeshTraining(config_of(build_config), lambda: ranks, None)
    training._deadline_s = NOW_S
    if slow:
        assert (await training.train(batch(0)))["loss/total"] == 1.0
    else:
        with pytest.raises(DeadlineExceeded, match=r"trainer-\d.train made no progress"):
            await training.train(batch(0))


async def test_a_checkpoint_waits_for_a_slow_rank_too(build_config: Any) -> None:
    processes = TrainerRanks(config_of(build_config), cast(Any, None), cast(Any, None))
    processes._deadline_s = NOW_S
    processes.all = ranks_of(None, slow=True)
    await processes.save(Path("/nowhere"), export=False)


VERSION = 3


async def over_fake_actors(build_config: Any) -> RestoredTeachers:
    ring = Ring(config(build_config, teacher="ema", replicas=2))
    await ring.begin()
    ranks = cast(list[SpawnedActor], [PublishingRank("trainer", VERSION)])
    return RestoredTeachers(lambda: ranks, ring.sdpo, 5.0)


@pytest.fixture(params=["fake", "RestoredTeachers"])
async def teachers(request: Any, build_config: Any) -> CheckpointedTeachers:
    if request.param == "RestoredTeachers":
        return await over_fake_actors(build_config)
    return fake_trainer.World(version=VERSION, average=0.0)


async def test_teachers_that_follow_have_the_trainers_version_and_write_its_average(
    teachers: CheckpointedTeachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.keep(VERSION)
    assert len(await teachers.write(tmp_path)) == 1


async def test_an_average_at_another_version_is_lost_and_nothing_is_written(
    teachers: CheckpointedTeachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.keep(VERSION)
    with pytest.raises(AverageLost):
        await teachers.keep(VERSION + 1)
    assert await teachers.write(tmp_path) == []


async def test_nothing_is_written_that_was_not_kept(
    teachers: CheckpointedTeachers, tmp_path: Path
) -> None:
    await teachers.follow()
    assert await teachers.write(tmp_path) == []


async def test_the_initial_average_can_be_restored_and_a_checkpoint_without_one_cannot(
    teachers: CheckpointedTeachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.forget()
    assert await teachers.restore(None, 0)
    assert not await teachers.restore(tmp_path, VERSION)
    await teachers.keep(0)
    await teachers.follow()
    await teachers.keep(VERSION)
