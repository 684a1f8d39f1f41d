"""A supervised run: a run whose steps train conversations, and that samples for evaluations only.

    evaluate -> [ conversations of the step -> train ] -> ... -> sync -> evaluate

Everything else is that of a run: actors, restarts, checkpoints, resume, evaluations, reports.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from composer_mesh.actors.mcp_servers.servers import serving
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.controller import Controller
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.run.assembly import TrainingRun
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.parts import RunParts
from composer_mesh.services.schedule.step_builder import PlannedStep, StepBuilder
from composer_mesh.services.sft.dataset import Dataset, load_dataset
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.step_manifest import manifest_from_json, manifest_to_json
from composer_mesh.services.store.rows import StepRow
from composer_mesh.tasks.task import Task

DIGEST = "sft/dataset"


@dataclass(frozen=True)
class SftBatcher(Batcher):
    """Takes the batch of a step from the conversations, whatever was rolled out."""

    dataset: Dataset

    def batch(self, step: int, *_rollouts: Any, **_others: Any) -> StepBatch:
        """Return the batch of a step."""
        return self.dataset.batch(step)


class SftStep(PlannedStep):
    """A step of conversations; the policy channel's loss on them is reported as `loss/sft`."""

    def metrics(self, trained: dict[str, Any]) -> dict[str, Any]:
        """Return the step's metrics, except its durations; those of rollouts are 0 or None."""
        own = {"loss/sft": trained["loss/policy"], "loss/policy": None}
        return super().metrics(trained) | own | {"reward/mean": None, "reward/success": None}


class SftController(Controller):
    """Trains the steps of a supervised run; rolls out nothing but evaluations."""

    def _fill_window(self) -> None:
        """Start no group."""

    async def _planned_step(self, step: int) -> PlannedStep:
        planned, self._planned = self._planned, None
        if planned is None:
            assert isinstance(self.step_builder.batcher, SftBatcher)
            dataset = self.step_builder.batcher.dataset
            figures = {"sft/epoch": dataset.epoch(step), DIGEST: dataset.digest}
            compose = partial(self.step_builder.compose, step, [], None, figures)
            planned, manifest = await self.ports.in_thread(compose)
            await self.ports.store.plan_step(step, (), manifest_to_json(manifest))
        return SftStep(**vars(planned))

    async def _serve(self, steps: int) -> None:
        """Sync the new version where an evaluation needs it."""
        if self._evaluates_after(steps) or steps == self.config.run.steps:
            await super()._serve(steps)


@dataclass(frozen=True)
class SftParts(RunParts):
    """Builds the parts of a supervised run."""

    dataset: Dataset
    controller_class: ClassVar[type[Controller]] = SftController

    def _step_builder(self, report: Callable[[str], object]) -> StepBuilder:
        builder = super()._step_builder(report)
        one = builder.batcher
        given = (one.config, one.task, one.chat, one.advantages, one.report)
        return replace(builder, batcher=SftBatcher(*given, self.dataset))


def refuse_other(steps: Iterable[StepRow], dataset: Dataset) -> None:
    """Raise RunDirectoryError where steps so far have trained other conversations."""
    for row in steps:
        if manifest_from_json(row.step, row.manifest).figures.get(DIGEST) != dataset.digest:
            raise RunDirectoryError(
                f"the conversations are not those of step {row.step + 1}: restore sft.path as it "
                "was, or start a new run"
            )


@dataclass
class SftRun(TrainingRun):
    """State of one supervised run."""

    dataset: Dataset | None = None

    async def _train_from(
        self, mesh: RunMesh, folder: Path, task: Task, chat: ChatFormat, heldout: Sequence[int]
    ) -> None:
        self.view.phase("encoding conversations")
        self.dataset = await in_thread(partial(self._load, task, chat))
        self.event("conversations", "", str(self.dataset))
        await asyncio.to_thread(refuse_other, self.store.reading.steps(), self.dataset)
        await super()._train_from(mesh, folder, task, chat, heldout)

    def _load(self, task: Task, chat: ChatFormat) -> Dataset:
        assert self.config.sft is not None
        played = self.config.sft.demonstrations > 0
        with serving(self.config, task) if played else nullcontext():
            return load_dataset(self.config, task, chat, self._report)

    def _report(self, done: int) -> None:
        self.view.phase(f"encoding conversations, {done:,} done")

    def _parts(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> RunParts:
        assert self.dataset is not None
        rest = (self.config, self.store, mesh, task, chat, self.event)
        return SftParts(*rest, dataset=self.dataset)
