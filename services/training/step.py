"""One optimizer step over the trainer's ranks and the SDPO teachers that serve them.

One try of it: what happens when a rank dies meanwhile is `fault_tolerant_trainer`'s business.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.manifest import Written
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.trainer import TrainReply
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, MeshError
from composer_mesh.mesh.waiting import together
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.packed_batch import PackedBatch
from composer_mesh.rollouts.step_plan import plan_step
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.services.training.ranks import WRITE_DEADLINE_S
from composer_mesh.services.training.teaching import SdpoTeachers
from composer_mesh.services.training.weight_sync import published

LARGEST = ("sdpo/teacher_version", "sdpo/bytes_per_token", "time/sdpo_bytes_per_s")
"""Figures that are no sums over ranks."""

Ranks = Callable[[], Sequence[SpawnedActor]]
"""The ranks that live now, in their order."""


class MeshTraining:
    """The trainer's ranks, and the SDPO teachers that serve them."""

    def __init__(self, config: Config, ranks: Ranks, teachers: SdpoTeachers | None) -> None:
        self._ranks, self._teachers = ranks, teachers
        self._trainer, self._deadline_s = config.trainer, config.run.deadline_s

    async def train(self, batch: StepBatch, teacher_outputs: bool = True) -> dict[str, Any]:
        """One optimizer step on all ranks. Waits for the teachers' signals and for the slowest.

        Without `teacher_outputs` the teachers are not asked, and the step lacks the SDPO channel.
        """
        ranks, alive = self._ranks(), list[SpawnedActor]()
        if self._teachers is not None and batch.views and teacher_outputs:
            alive = await self._teachers.ready(batch.step)
        packed = await PackedBatch.of(batch)
        work: list[Coroutine[Any, Any, Any]] = [
            rank.call("train", packed, len(alive), deadline_s=self._deadline_s) for rank in ranks
        ]
        if self._teachers is not None and alive:
            trainer = self._trainer
            plans = plan_step(batch, trainer.microbatch_tokens, len(ranks), trainer.packing)
            work.append(self._teachers.feed(batch, plans, alive, ranks))
        replies: list[TrainReply] = (await together(*work))[: len(ranks)]
        return {**replies[0].metrics, **joined([reply.figures for reply in replies])}


def joined(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of a step from those of its ranks: sums, but for rates and versions."""
    total: dict[str, float] = {"sdpo/bytes": 0}
    for figures in ranks:
        for name, value in figures.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name in LARGEST else before + value
    return total


class RestoredTeachers:
    """The SDPO teachers, as far as a trainer that began again needs them to begin again too.

    A moving average is the same in each, so one of them keeps it and writes it.
    """

    def __init__(self, ranks: Ranks, teachers: SdpoTeachers, deadline_s: float) -> None:
        self._ranks, self._teachers, self._deadline_s = ranks, teachers, deadline_s
        self._keeper: SpawnedActor | None = None

    async def forget(self) -> None:
        """Void what the former ranks had asked for."""
        await self._teachers.forget()

    async def follow(self) -> None:
        """Bring the teachers the weights that the trainer has now."""
        ranks = self._ranks()
        handle = await published(ranks, self._deadline_s)
        await self._teachers.pull(handle, ranks[0])

    async def keep(self, version: int) -> None:
        """Let a teacher copy its average at a version, for `write`; raises `AverageLost`."""
        self._keeper, why = None, "no SDPO teacher is alive"
        for teacher in self._teachers.alive():
            try:
                found: int = await teacher.call("keep", deadline_s=self._deadline_s)
            except MeshError as error:
                why = str(error)
                continue
            if found == version:
                self._keeper = teacher
                return
            why = f"{teacher.name} is at version {found} but the trainer at {version}"
        raise AverageLost(why)

    async def write(self, draft: Path) -> list[Written]:
        """Let it write the copy. Waits until that is on disk; raises `AverageLost`."""
        if self._keeper is None:
            return []
        try:
            files: list[Written] = await self._keeper.call(
                "write", draft, deadline_s=WRITE_DEADLINE_S
            )
        except MeshError as error:
            raise AverageLost(str(error)) from error
        return files

    async def restore(self, checkpoint: Path | None, version: int) -> bool:
        """Give all teachers the average of a checkpoint, None for the start; whether it was there.

        One that dies meanwhile is replaced, and takes the average from the others.
        """
        file = None if checkpoint is None else checkpoint / AVERAGE_FILE
        if file is not None and not file.exists():
            return False
        asked = [self._restored(one, version, file) for one in self._teachers.alive()]
        return any(await asyncio.gather(*asked))

    async def _restored(self, teacher: SpawnedActor, version: int, file: Path | None) -> bool:
        try:
            await teacher.call("restore", version, file, deadline_s=self._deadline_s)
        except ActorDied:
            return False
        return True
