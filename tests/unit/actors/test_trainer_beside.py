"""The trainer actor: a version is copied beside the next step, and updated after the copy."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from composer_mesh.actors.checkpoints.folder import CheckpointFailed
from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.packing import PackedBatch
from composer_mesh.rollouts.traces import TurnDivergences

LONG_ENOUGH_S = 0.05
"""What something that should wait, and does not, is given to show it."""
VERSION = 3
FULL = Path("step-4")
"""A checkpoint for which there is no room."""


class Script:
    """A learner and a publisher that write down what they do, and wait where they are told to."""

    version = VERSION
    divergences: ClassVar[list[TurnDivergences]] = []

    def __init__(self) -> None:
        self.log: list[str] = []
        self.began, self.backward = threading.Event(), threading.Event()
        self.disk = threading.Event()
        self.disk.set()
        self.may_copy = asyncio.Event()
        self.backward.set()
        self.loss: Callable[[], Any] = self.backward.wait

    def train(self, batch: StepBatch, source: Any, before_update: Callable[[], None]) -> Any:
        self.began.set()
        self.loss()
        self.log.append("backward")
        before_update()
        self.version += 1
        self.log.append("update")
        return {}

    def join_islands(self) -> None:
        """Be no island."""

    def new_events(self) -> list[tuple[str, str]]:
        return []

    def copy(self, export: bool) -> None:
        self.log.append(f"state {self.version}{' to export' if export else ''}")

    def write(self, draft: Path, export: bool) -> list[WrittenFile]:
        self.disk.wait()
        self.log.append(f"written {draft}")
        if draft == FULL:
            raise CheckpointFailed(str(draft), "No space left on device")
        return [WrittenFile(f"{export}", 1, 2)]

    async def publish(self, version: int) -> str:
        await self.may_copy.wait()
        self.log.append(f"copied {version}")
        return f"handle of {version}"


class ScriptedTrainer(TrainerActor):
    """A trainer at version 3 without a model."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    def _build(self, config: Config, folder: Path) -> None:
        self._config = config.sdpo
        self._learner = self._publisher = self.script  # type: ignore[assignment]

    def ask(self, endpoint: str, *args: Any) -> asyncio.Task[Any]:
        """Call an endpoint as a message would, without a mesh."""
        work = inspect.unwrap(getattr(TrainerActor, endpoint)._method)
        return asyncio.create_task(work(self, *args))


@pytest.fixture
async def trainer(build_config: Any) -> AsyncIterator[ScriptedTrainer]:
    trainer = ScriptedTrainer(Script())
    assert await trainer.ask("load", build_config(), Path()) == VERSION
    yield trainer
    # So that no thread of a test that failed waits for ever.
    trainer.script.backward.set()
    trainer.script.may_copy.set()
    trainer.script.disk.set()


async def batch() -> PackedBatch:
    return await PackedBatch.of(StepBatch(VERSION, [], [], []))


async def waits(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait([task], timeout=LONG_ENOUGH_S)
    return not task.done()


async def test_a_step_computes_beside_the_copy_of_its_version_and_updates_after_it(
    trainer: ScriptedTrainer,
) -> None:
    script = trainer.script
    assert await trainer.ask("hold") == VERSION
    training = trainer.ask("train", await batch())
    publishing = trainer.ask("publish")
    await asyncio.to_thread(script.began.wait)
    assert await waits(training)
    assert script.log == ["backward"]
    script.may_copy.set()
    await training
    assert await publishing == f"handle of {VERSION}"
    assert script.log == ["backward", f"copied {VERSION}", "update"]
    assert trainer.policy_version == VERSION + 1


async def test_a_version_that_is_held_is_published_however_late_it_is_asked_for(
    trainer: ScriptedTrainer,
) -> None:
    script = trainer.script
    script.may_copy.set()
    await trainer.ask("hold")
    training = trainer.ask("train", await batch())
    assert await waits(training)
    assert await trainer.ask("publish") == f"handle of {VERSION}"
    await training
    assert script.log == ["backward", f"copied {VERSION}", "update"]


async def test_without_a_hold_a_version_is_published_between_two_steps(
    trainer: ScriptedTrainer,
) -> None:
    script = trainer.script
    script.may_copy.set()
    script.backward.clear()
    training = trainer.ask("train", await batch())
    await asyncio.to_thread(script.began.wait)
    publishing, holding = trainer.ask("publish"), trainer.ask("hold")
    assert await waits(publishing)
    script.backward.set()
    await training
    assert await publishing == f"handle of {VERSION + 1}"
    assert await holding == VERSION + 1
    assert script.log == ["backward", "update", f"copied {VERSION + 1}"]


async def test_a_checkpoint_waits_for_the_copy(trainer: ScriptedTrainer) -> None:
    script = trainer.script
    publishing = trainer.ask("publish")
    saving = trainer.ask("save", Path("step-3"), False)
    assert await waits(saving)
    script.may_copy.set()
    await asyncio.gather(publishing, saving)
    assert await trainer.ask("saved") == [WrittenFile("False", 1, 2)]
    assert script.log == [f"copied {VERSION}", f"state {VERSION}", "written step-3"]


async def test_a_step_is_trained_beside_the_write_of_a_checkpoint(
    trainer: ScriptedTrainer,
) -> None:
    script = trainer.script
    script.disk.clear()
    await trainer.ask("save", Path("step-3"), True)
    writing = trainer.ask("saved")
    await trainer.ask("train", await batch())
    assert not writing.done()
    script.disk.set()
    assert await writing == await trainer.ask("saved") == [WrittenFile("True", 1, 2)]
    assert script.log == [f"state {VERSION} to export", "backward", "update", "written step-3"]


async def test_a_write_that_fails_is_told_to_whoever_waits_for_it(
    trainer: ScriptedTrainer,
) -> None:
    await trainer.ask("save", FULL, True)
    with pytest.raises(CheckpointFailed, match="No space left on device"):
        await trainer.ask("saved")


async def test_a_custom_loss_without_end_fails_its_step_with_its_name(
    trainer: ScriptedTrainer,
) -> None:
    script = trainer.script
    script.backward.clear()
    trainer._custom = RunningCall(limit_s=0.01)
    script.loss = trainer._custom.watched(script.backward.wait, "users.endless")
    with pytest.raises(CustomFunctionError, match=r"users\.endless.* within 0\.01 s: look for"):
        await trainer.ask("train", await batch())
    assert script.log == []  # its thread is still in it
