"""The moving average of teachers in processes of their own: one keeps it, all get it back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from fake_teachers import FakeTeacher, PublishingRank, Ring, config, weights

from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.services.training.step import RestoredTeachers

VERSION = 4


async def served(build_config: Any, replicas: int = 2) -> tuple[Ring, RestoredTeachers]:
    """Teachers that have followed the trainer to a version."""
    ring = Ring(config(build_config, replicas=replicas, teacher="ema"), ranks=[1])
    await ring.begin()
    await ring.sdpo.pull(weights(VERSION))
    ring.log.clear()
    ranks = cast(list[SpawnedActor], [PublishingRank("trainer.2", VERSION - 2)])
    return ring, RestoredTeachers(lambda: ranks, ring.sdpo, 5.0)


async def test_one_teacher_keeps_the_average_and_the_same_one_writes_it(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    await teachers.keep(VERSION)
    (file,) = await teachers.write(Path("draft"))
    assert file.path == AVERAGE_FILE
    assert ring.log == [("keep", "sdpo_teacher-0", VERSION), ("write", "sdpo_teacher-0")]


async def test_a_teacher_that_is_not_where_the_trainer_is_keeps_nothing(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    ring.host.started[0].version = VERSION - 1
    await teachers.keep(VERSION)
    await teachers.write(Path("draft"))
    assert ring.of("write") == [("write", "sdpo_teacher-1")]
    with pytest.raises(AverageLost, match="sdpo_teacher-1 is at version 4 but the trainer at 5"):
        await teachers.keep(VERSION + 1)
    assert await teachers.write(Path("draft")) == []


async def test_without_a_living_teacher_there_is_nothing_to_keep(build_config: Any) -> None:
    ring, teachers = await served(build_config, replicas=1)
    ring.host.started[0].die()
    with pytest.raises(AverageLost, match="no SDPO teacher is alive"):
        await teachers.keep(VERSION)


async def test_a_teacher_that_dies_while_it_writes_loses_the_average(build_config: Any) -> None:
    ring, teachers = await served(build_config)
    ring.host.started[0].block("write")
    await teachers.keep(VERSION)
    writing = asyncio.create_task(teachers.write(Path("draft")))
    await ring.settle()
    ring.host.started[0].die()
    with pytest.raises(AverageLost, match="sdpo_teacher-0 died"):
        await writing


async def test_every_teacher_gets_the_average_of_the_checkpoint(
    build_config: Any, tmp_path: Path
) -> None:
    ring, teachers = await served(build_config)
    assert not await teachers.restore(tmp_path, 2)
    assert ring.of("restore") == []
    (tmp_path / AVERAGE_FILE).parent.mkdir()
    (tmp_path / AVERAGE_FILE).touch()
    assert await teachers.restore(tmp_path, 2)
    both = [("restore", f"sdpo_teacher-{n}", 2, tmp_path / AVERAGE_FILE) for n in (0, 1)]
    assert ring.of("restore") == both


async def test_a_run_without_a_checkpoint_goes_back_to_the_initial_policy(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    assert await teachers.restore(None, 0)
    assert ring.of("restore") == [("restore", "sdpo_teacher", 0, None)]


async def test_a_teacher_that_died_with_the_trainer_is_replaced_before_the_average_is_restored(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    trainer = PublishingRank("trainer", VERSION)
    await ring.sdpo.pull(weights(VERSION), cast(SpawnedActor, trainer))
    trainer.die()
    ring.host.started[0].die()
    assert await asyncio.wait_for(teachers.restore(None, 0), 5)
    assert ring.log[-1] == ("restore", "sdpo_teacher", 0, None)
    assert ring.host.started[1].version == 0


@pytest.mark.parametrize("how", ["dies", "fails"])
async def test_all_teachers_restore_the_average_again_after_one_is_replaced(
    build_config: Any, how: str
) -> None:
    ring, teachers = await served(build_config)
    first, second = ring.host.started
    gate = first.block("restore")
    restoring = asyncio.create_task(teachers.restore(None, 0))
    await ring.settle()
    if how == "dies":
        first.die()
    else:
        first.error = MemoryError()
        gate.set()
    assert await asyncio.wait_for(restoring, 5)
    names = [entry[1] for entry in ring.of("restore")]
    assert names == ["sdpo_teacher-1", "sdpo_teacher-0", "sdpo_teacher-1"]
    assert (ring.host.started[2].version, second.version) == (0, 0)


async def test_an_average_that_no_teacher_is_left_for_ends_the_run_with_the_reason(
    build_config: Any,
) -> None:
    ring, teachers = await served(build_config, replicas=1)
    ring.host.prepare = FakeTeacher.die
    ring.host.started[0].die()
    with pytest.raises(ActorDied, match="sdpo_teacher died"):
        await asyncio.wait_for(teachers.restore(None, 0), 5)
