"""The port `Teachers` of training: the fake and `RestoredTeachers` keep its contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import fake_trainer
import pytest
from fake_teachers import PublishingRank, Ring, config

from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.services.training.checkpoint_writes import AverageLost, Teachers
from composer_mesh.services.training.step import RestoredTeachers

VERSION = 3


async def over_fake_actors(build_config: Any) -> RestoredTeachers:
    ring = Ring(config(build_config, teacher="ema", replicas=2))
    await ring.begin()
    ranks = cast(list[SpawnedActor], [PublishingRank("trainer", VERSION)])
    return RestoredTeachers(lambda: ranks, ring.sdpo, 5.0)


@pytest.fixture(params=["fake", "RestoredTeachers"])
async def teachers(request: Any, build_config: Any) -> Teachers:
    if request.param == "RestoredTeachers":
        return await over_fake_actors(build_config)
    return fake_trainer.World(version=VERSION, average=0.0)


async def test_teachers_that_follow_have_the_trainers_version_and_write_its_average(
    teachers: Teachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.keep(VERSION)
    assert len(await teachers.write(tmp_path)) == 1


async def test_an_average_at_another_version_is_lost_and_nothing_is_written(
    teachers: Teachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.keep(VERSION)
    with pytest.raises(AverageLost):
        await teachers.keep(VERSION + 1)
    assert await teachers.write(tmp_path) == []


async def test_nothing_is_written_that_was_not_kept(teachers: Teachers, tmp_path: Path) -> None:
    await teachers.follow()
    assert await teachers.write(tmp_path) == []


async def test_the_initial_average_can_be_restored_and_a_checkpoint_without_one_cannot(
    teachers: Teachers, tmp_path: Path
) -> None:
    await teachers.follow()
    await teachers.forget()
    assert await teachers.restore(None, 0)
    assert not await teachers.restore(tmp_path, VERSION)
    await teachers.keep(0)
    await teachers.follow()
    await teachers.keep(VERSION)
