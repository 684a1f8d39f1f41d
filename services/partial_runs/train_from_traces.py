"""Training on stored rollouts without generators.

Differences from the first training are reported at the end. Without generators and teacher replay
nothing is sampled, queried or evaluated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from composer_mesh.configs.schema import Config
from composer_mesh.services.partial_runs.stored_steps import StoredStep
from composer_mesh.services.steps.ports import MayTrain, Store, Training, Watcher, WeightSync
from composer_mesh.services.steps.recomputation_check import Differences, Trained
from composer_mesh.services.training.step import Ranks
from composer_mesh.services.training.teaching import SdpoTeachers
from composer_mesh.services.training.weight_sync import published


class TeacherSyncOnly:
    """Weight sync for a run in which only the SDPO teachers pull."""

    def __init__(self, ranks: Ranks, teachers: SdpoTeachers | None, deadline_s: float) -> None:
        self._ranks, self._teachers, self._deadline_s = ranks, teachers, deadline_s

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Publish, let the teachers pull, and return the version; no step runs concurrently."""
        del on_snapshot
        handle = await published(self._ranks(), self._deadline_s)
        if self._teachers is not None:
            await self._teachers.pull(handle, self._ranks()[0])
        return handle.version


@dataclass(frozen=True)
class TrainingFromTracesPorts:
    """Dependencies of the training loop; `weights` is None if no teacher pulls."""

    trainer: Training
    weights: WeightSync | None
    store: Store
    watch: Watcher
    save: Callable[[int], Awaitable[None]]
    saved: Callable[[], Awaitable[None]]


class TrainingFromTraces:
    """Training loop over stored steps, in one event loop."""

    def __init__(
        self, config: Config, steps: Iterable[StoredStep], ports: TrainingFromTracesPorts
    ) -> None:
        self._steps, self._ports = iter(steps), ports
        self._every, self._last = config.trainer.checkpoint_every, config.run.steps
        self.differences = Differences()
        self.step = self._saved = 0

    async def run(self) -> None:
        """Train all stored steps, then save. Waits for the last checkpoint."""
        # Building a batch reads files and uses the CPU, which would block the event loop.
        while (stored := await asyncio.to_thread(next, self._steps, None)) is not None:
            await self._one_step(stored)
        if self.step != self._saved:
            await self._save()
        await self._ports.saved()

    async def _save(self) -> None:
        await self._ports.save(self.step)
        self._saved = self.step

    async def _one_step(self, stored: StoredStep) -> None:
        now = asyncio.get_running_loop().time
        ports, batch, began = self._ports, stored.composed.batch, now()
        await ports.store.plan_step(batch.step, (), b"")
        trained = await ports.trainer.train(batch)
        stepped = now()
        if ports.weights is not None:
            await ports.weights.sync()
        metrics = stored.composed.metrics(trained)
        metrics["time/step_s"], metrics["time/train_s"] = now() - began, stepped - began
        metrics["time/weight_sync_s"] = now() - stepped
        self.step = batch.step + 1
        await ports.store.end_step(batch.step, metrics)
        ports.watch.update(metrics)
        if stored.before is not None:
            self.differences.note(Trained(batch, dict(stored.before)), trained)
        if self._every and self.step % self._every == 0 and self.step < self._last:
            await self._save()
