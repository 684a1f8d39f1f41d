"""A run's checkpoints: written beside the steps, kept until the next is whole, begun again from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import Running, batch

from composer_mesh.actors.checkpoints.folder import (
    CheckpointFailed,
    checkpoints_of,
    folder_of,
    newest,
)
from composer_mesh.actors.checkpoints.manifest import damage
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.steps.logprob_mismatch import Trained
from composer_mesh.services.training import checkpoint_writes

DEATH = ActorDied("trainer", "killed by signal 9")
FULL = CheckpointFailed("/run/checkpoints/.step-4.1-0", "No space left on device")
STEPS = 12


@pytest.fixture
def run(build_config: Any, tmp_path: Path) -> Running:
    return Running(build_config, tmp_path)


@pytest.fixture
def ema(build_config: Any, tmp_path: Path) -> Running:
    return Running(build_config, tmp_path, sdpo={"teacher": "ema"})


async def stepped(run: Running, step: int) -> dict[str, Any]:
    """Train a step and serve what came of it; returns its metrics."""
    metrics = await run.trainer.train(batch(step))
    await run.trainer.sync()
    return metrics


def kept_batches(run: Running) -> list[int]:
    return [one.batch.step for one in run.trainer._since]


async def trained(run: Running, first: int, last: int) -> list[Trained]:
    """Train steps without checkpoints; what a run's store would remember of them."""
    return [Trained(batch(step), await stepped(run, step)) for step in range(first, last)]


async def resumed(run: Running, past: list[Trained]) -> None:
    """Begin as another process does: at the newest checkpoint, with what was trained since."""
    found = newest(run.root)
    folder = None if found is None else found.folder
    run.world.taught_version = 0 if run.world.average is None else -1
    await run.world.restart_from(folder)
    run.trainer = run.made(found)
    await run.trainer.catch_up(past)


async def test_saving_waits_for_the_copy_and_not_for_the_disk(run: Running) -> None:
    run.world.disk = asyncio.Event()
    for step in range(4):
        await stepped(run, step)
    await run.trainer.save(4)
    metrics = await stepped(run, 4)
    assert newest(run.root) is None
    assert kept_batches(run) == [0, 1, 2, 3, 4]
    assert metrics["time/checkpoint_stall_s"] > 0
    run.world.disk.set()
    await run.trainer.saved()
    found = newest(run.root)
    assert found is not None
    assert (found.step, damage(found.folder)) == (4, [])
    assert kept_batches(run) == [4]
    assert (found.folder / "state").read_text().startswith("4 ")
    assert (await stepped(run, 5))["time/checkpoint_stall_s"] == 0


async def test_the_last_checkpoint_of_a_run_is_whole_when_it_is_saved(run: Running) -> None:
    for step in range(STEPS):
        await stepped(run, step)
    await run.trainer.save(STEPS)
    assert [one.step for one in checkpoints_of(run.root)] == [STEPS]


async def test_a_checkpoint_waits_for_the_one_before_it(run: Running) -> None:
    run.world.disk = asyncio.Event()
    await stepped(run, 0)
    await run.trainer.save(1)
    await stepped(run, 1)
    second = asyncio.create_task(run.trainer.save(2))
    for _ in range(9):
        await asyncio.sleep(0)
    assert run.world.copied[1].startswith("1 ")
    run.world.disk.set()
    await second
    await run.trainer.saved()
    assert [one.step for one in checkpoints_of(run.root)] == [1, 2]


async def test_a_death_while_it_is_written_begins_at_the_one_before_and_writes_it_then(
    run: Running, build_config: Any, tmp_path: Path
) -> None:
    run.world.fails["saved"] = [None, DEATH]
    await run.steps(0, 8)
    assert run.world.done("begin") == [4]
    assert run.world.done("train")[-4:] == [4, 5, 6, 7]
    assert [one.step for one in checkpoints_of(run.root)] == [4, 8]
    assert kept_batches(run) == []
    assert (folder_of(run.root, 8) / "state").read_text() == f"8 {run.world.weight!r}"


def flip(run: Running, step: int) -> None:
    """Let the disk change a byte of a checkpoint."""
    state = folder_of(run.root, step) / "state"
    state.write_text(state.read_text()[:-1] + "x")


@pytest.mark.parametrize("kind", ["live", "ema"])
@pytest.mark.parametrize(("flipped", "resumed_from"), [((8,), 4), ((4, 8), 0)])
async def test_a_damaged_checkpoint_is_set_aside_and_the_steps_since_another_trained_again(
    build_config: Any, tmp_path: Path, kind: str, flipped: tuple[int, ...], resumed_from: int
) -> None:
    run = Running(build_config, tmp_path, sdpo={"teacher": kind})
    await run.steps(0, 10)
    for step in flipped:
        flip(run, step)
    run.world.fails["train"] = [DEATH]
    await run.steps(10, 12)
    assert run.world.done("begin") == [resumed_from]
    assert run.world.done("train")[-12 + resumed_from :] == list(range(resumed_from, 12))
    other = Running(build_config, tmp_path / "other", sdpo={"teacher": kind})
    await other.steps(0, 12)
    assert run.world.weight == other.world.weight
    (told,) = run.told()
    assert f"{10 - resumed_from} steps trained again to the same losses and gradients" in told
    aside = [event[2] for event in run.world.events if event[0] == "quarantined"]
    assert [text.split(":")[0] for text in aside] == [
        f"checkpoint of step {step}" for step in reversed(flipped)
    ]
    assert aside[0].endswith("kept as quarantine/step-8")


async def test_a_checkpoint_is_written_in_place_of_a_damaged_one(run: Running) -> None:
    await run.steps(0, 8)
    flip(run, 8)
    run.world.fails["train"] = [DEATH, *[None] * 5, ActorDied("trainer.2", "memory")]
    await run.steps(8, 12)
    assert run.world.done("begin") == [4, 4]
    assert [one.step for one in checkpoints_of(run.root)] == [4, 12]


async def test_a_checkpoint_that_is_whole_after_all_is_begun_from(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had its name when removing an older one failed."""
    await run.steps(0, 7)

    def unremovable(*_: object) -> None:
        raise OSError("a folder is busy")

    monkeypatch.setattr(checkpoint_writes, "prune", unremovable)
    await run.steps(7, 9)
    assert kept_batches(run) == [4, 5, 6, 7, 8]
    run.world.fails["train"] = [DEATH]
    await run.steps(9, 10)
    assert run.world.done("begin") == [8]
    assert run.world.done("train")[-2:] == [8, 9]


async def test_steps_that_the_store_cannot_give_end_a_run_whose_checkpoint_is_damaged(
    run: Running,
) -> None:
    await run.steps(0, 10)
    flip(run, 8)
    del run.stored[5]
    run.world.fails["train"] = [DEATH]
    with pytest.raises(RuntimeError, match="has not all steps from 4 to 8"):
        await run.steps(10, 12)
    assert run.world.done("begin") == []


async def test_a_disk_that_fails_once_costs_a_checkpoint_and_an_event(run: Running) -> None:
    run.world.fails["saved"] = [None, FULL]
    await run.steps(0, 11)
    assert [one.step for one in checkpoints_of(run.root)] == [4]
    assert kept_batches(run) == [4, 5, 6, 7, 8, 9, 10]
    (failed,) = [event for event in run.world.events if event[0] == "checkpoint_failed"]
    assert failed[2] == (
        f"the checkpoint {folder_of(run.root, 8)} could not be written (No space left on device): "
        "free space for it and continue with --resume, which starts from the one before it"
    )
    assert run.trainer.restarts == 0
    assert sorted(path.name for path in (run.root / "checkpoints").iterdir()) == ["step-4"]


async def test_failures_that_have_one_between_them_that_is_written_do_not_add_up(
    build_config: Any, tmp_path: Path
) -> None:
    run = Running(build_config, tmp_path, trainer={"checkpoint_every": 2})
    run.world.fails["saved"] = [FULL, None, FULL]
    await run.steps(0, 9)
    assert [one.step for one in checkpoints_of(run.root)] == [4, 8]


@pytest.mark.parametrize(
    ("every", "fails", "steps"), [(4, [None, FULL, FULL], 12), (6, [None, FULL], 12)]
)
async def test_a_second_failure_and_that_of_the_last_step_end_the_run_without_a_restart(
    build_config: Any, tmp_path: Path, every: int, fails: list[Any], steps: int
) -> None:
    run = Running(build_config, tmp_path, trainer={"checkpoint_every": every})
    run.world.fails["saved"] = fails
    with pytest.raises(CheckpointFailed, match=r"step-12 could not be written \(No space left"):
        await run.steps(0, steps)
    assert run.trainer.restarts == 0
    assert [one.step for one in checkpoints_of(run.root)] == [every]


async def test_a_write_under_way_ends_with_the_run(run: Running) -> None:
    run.world.disk = asyncio.Event()

    async def one_step() -> None:
        await stepped(run, 0)
        await run.trainer.save(1)
        raise LookupError("the run ends")

    with pytest.raises(LookupError):
        await run.trainer.during(one_step())
    assert run.trainer._writing is not None
    assert run.trainer._writing.done()


async def test_the_newest_are_kept_and_those_of_every_so_many_steps(
    build_config: Any, tmp_path: Path
) -> None:
    trainer = {"checkpoint_every": 1, "checkpoints_kept": 1, "checkpoint_keep_every": 5}
    run = Running(build_config, tmp_path, trainer=trainer)
    await run.steps(0, 11)
    assert [one.step for one in checkpoints_of(tmp_path)] == [5, 10, 11]


@pytest.mark.parametrize(
    ("export", "expected"), [(True, [True] * 3), (False, [False, False, True])]
)
async def test_the_last_checkpoint_is_a_model_folder_in_any_case(
    build_config: Any, tmp_path: Path, export: bool, expected: list[bool]
) -> None:
    run = Running(build_config, tmp_path, trainer={"checkpoint_export": export})
    await run.steps(0, 12)
    assert run.world.exported == expected


@pytest.mark.parametrize("kind", ["live", "ema"])
@pytest.mark.parametrize("stopped", range(12))
async def test_a_resumed_run_trains_the_steps_since_the_checkpoint_again_and_goes_on(
    build_config: Any, tmp_path: Path, kind: str, stopped: int
) -> None:
    run = Running(build_config, tmp_path, sdpo={"teacher": kind})
    resumed_from = stopped // 4 * 4
    await run.steps(0, resumed_from)
    past = await trained(run, resumed_from, stopped)
    weight = run.world.weight
    await resumed(run, past)
    assert run.world.weight == weight
    assert await run.trainer.sync() == stopped
    await run.steps(stopped, 12)
    other = Running(build_config, tmp_path / "other", sdpo={"teacher": kind})
    await other.steps(0, 12)
    assert run.world.weight == other.world.weight
    told = [event[2] for event in run.world.events if event[0] == "run_caught_up"]
    count = stopped - resumed_from
    assert told == [
        f"{count} step{'s' * (count > 1)} trained again to the same losses and gradients, "
        f"continues at version {stopped}"
    ] * bool(count)


async def test_a_checkpoint_that_is_missing_behind_a_resumed_run_is_made_up_for(
    ema: Running,
) -> None:
    past = await trained(ema, 0, 10)
    await resumed(ema, past)
    assert [one.step for one in checkpoints_of(ema.root)] == [8]
    assert kept_batches(ema) == [8, 9]


@pytest.mark.parametrize("when", range(3))
async def test_ranks_that_die_while_a_resumed_run_catches_up_begin_once_more(
    run: Running, when: int
) -> None:
    past = await trained(run, 0, 3)
    weight = run.world.weight
    run.world.fails["train"] = [*[None] * when, ActorDied("trainer.2", "memory")]
    await resumed(run, past)
    assert run.trainer.restarts == 1
    assert run.world.weight == weight
    assert await run.trainer.sync() == 3


async def test_a_step_that_differs_when_it_is_trained_again_is_told(run: Running) -> None:
    past = await trained(run, 0, 1)
    past[0].metrics["loss/total"] *= 2
    await resumed(run, past)
    (told,) = [event[2] for event in run.world.events if event[0] == "run_caught_up"]
    assert told == (
        "1 step trained again, whose losses and gradients differ by up to 0.5 of their size, "
        "continues at version 1"
    )


async def test_a_run_that_begins_has_nothing_to_catch_up_with(ema: Running) -> None:
    await ema.trainer.catch_up([])
    assert ema.world.log == []
    assert ema.world.events == []
