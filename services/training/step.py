"""One optimizer step over the trainer's ranks and the SDPO teachers.

A single attempt: `fault_tolerant_trainer` handles ranks that die during it.

Weight sync: every trainer rank publishes, and generators and teachers pull from all ranks.

Only orders the calls; `mesh.weights` moves the bytes.
"""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.trainer import TrainReply
from composer_mesh.configs.schema import Config
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.spawned import SpawnedActor, record_nothing, working_together
from composer_mesh.mesh.supervision import MeshError, Recorder
from composer_mesh.mesh.waiting import together
from composer_mesh.mesh.weights.manifest import WeightsHandle
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.packing import PackedBatch
from composer_mesh.rollouts.step_plan import minibatches, plan_views
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.service import Service
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.services.training.rank_processes import WRITE_DEADLINE_S
from composer_mesh.services.training.teaching import SdpoTeachers


class StaleReceiver(Worded, RuntimeError):
    """A receiver reports another version after a pull than the published one."""

    message = "published version {0} but receivers serve {1}"


class MeshWeightSync:
    """Syncs weights from the current trainer to generators and, with SDPO, its teachers.

    Each rank publishes its part of a version, and receivers pull all parts. A publisher has two
    buffers; a version is published only after the previous one was pulled by all, so a buffer is
    never overwritten while it is read.
    """

    def __init__(
        self,
        trainers: Callable[[], Sequence[SpawnedActor]],
        generators: Service | None,
        teachers: SdpoTeachers | None,
        deadline_s: float,
    ) -> None:
        """`generators` is None in a run that samples nothing."""
        self._trainers, self._generators, self._teachers = trainers, generators, teachers
        self._deadline_s = deadline_s

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Publish and pull the current version, and return it; it is served from now on.

        Waits until each generator serves it, at most the deadline for each call. A receiver that
        dies, fails or is late is dropped and replaced; replacements pull before they serve. Raises
        `ActorDied` if the trainer dies: receivers then keep their former version.

        With `on_snapshot` a step may run concurrently: the trainer keeps the version unchanged
        until it is copied, and teachers, whose outputs belong to the version being trained, pull it
        first.
        """
        trainers = self._trainers()
        if on_snapshot is not None:
            await _ask(trainers, "hold", self._deadline_s)
            if self._teachers is None:
                on_snapshot()
        handle = await published(trainers, self._deadline_s)
        pulls: list[Coroutine[Any, Any, list[int]]] = []
        if self._generators is not None:
            pulls.append(self._generators.broadcast_weights(trainers[0], "pull", handle))
        if self._teachers is not None:
            pulls.append(self._teach(self._teachers, handle, trainers[0], on_snapshot))
        versions = await together(*pulls) if pulls else []
        got = [version for found in versions for version in found]
        if any(version != handle.version for version in got):
            raise StaleReceiver(handle.version, got)
        return handle.version

    async def _teach(
        self,
        teachers: SdpoTeachers,
        handle: WeightsHandle,
        trainer: SpawnedActor,
        on_snapshot: MayTrain | None,
    ) -> list[int]:
        got = await teachers.pull(handle, trainer)
        if on_snapshot is not None:
            on_snapshot()
        return got


async def published(trainers: Sequence[SpawnedActor], deadline_s: float) -> WeightsHandle:
    """Publish the ranks' current version in full. Waits until each rank has copied it."""
    return WeightsHandle.joined(await _ask(trainers, "publish", deadline_s))


async def _ask(trainers: Sequence[SpawnedActor], endpoint: str, deadline_s: float) -> list[Any]:
    """Call an endpoint on all ranks concurrently, since it may be collective."""
    with working_together(lambda: trainers):
        return await together(*(rank.call(endpoint, deadline_s=deadline_s) for rank in trainers))


LARGEST = ("sdpo/teacher_version", "sdpo/bytes_per_token", "time/sdpo_bytes_per_s")
"""Metrics that are maxima over ranks instead of sums."""

Ranks = Callable[[], Sequence[SpawnedActor]]
"""Returns the current ranks in rank order."""

KeepDivergences = Callable[[int, Sequence[TurnDivergences]], object]
"""Keeps the divergences of a step (from 0), from all ranks, for whoever looks at them later."""


def keep_none(_step: int, _divergences: Sequence[TurnDivergences]) -> None:
    """Drop a step's divergences."""


class MeshTraining:
    """Trains steps on the trainer's ranks with the outputs of the SDPO teachers.

    `record` receives what happened to the rounds of an island.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        teachers: SdpoTeachers | None,
        keep: KeepDivergences = keep_none,
        record: Recorder = record_nothing,
    ) -> None:
        self._ranks, self._teachers, self._keep = ranks, teachers, keep
        self._trainer, self._record = config.trainer, record
        self._deadline_s = config.run.deadline_s + config.islands.longest_wait_s

    async def train(self, batch: StepBatch, teacher_outputs: bool | None = None) -> dict[str, Any]:
        """Train one optimizer step on all ranks. Waits for teacher outputs and the slowest rank.

        `teacher_outputs` is True if the step requires them, False if no teacher is queried and the
        step lacks the SDPO channel, and None if `sdpo.when_lost` decides.
        """
        ranks, alive = self._ranks(), list[SpawnedActor]()
        required = bool(teacher_outputs)
        if self._teachers is not None and batch.views and teacher_outputs is not False:
            alive = await self._teachers.ready(batch.step, required)
        packed = await PackedBatch.of(batch)
        work: list[Coroutine[Any, Any, Any]] = [
            rank.call("train", packed, len(alive), deadline_s=self._deadline_s) for rank in ranks
        ]
        if self._teachers is not None and alive:
            trainer = self._trainer
            plans = plan_views(
                batch,
                minibatches(batch, trainer.updates_per_batch, trainer.epochs),
                trainer.microbatch_tokens,
                len(ranks) // trainer.context_parallel,
                trainer.packing,
                trainer.sharing,
            )
            work.append(self._teachers.feed(batch, plans, alive, ranks, required))
        with working_together(self._at_work):
            replies: list[TrainReply] = (await together(*work))[: len(ranks)]
        for kind, text in replies[0].new_events:
            self._record(kind, ranks[0].name, text)
        if divergences := [one for reply in replies for one in reply.divergences]:
            self._keep(batch.step, divergences)
        return {**replies[0].metrics, **joined([reply.figures for reply in replies])}

    def _at_work(self) -> list[SpawnedActor]:
        """Return the actors of a step: any of them may wait for any other."""
        return [*self._ranks(), *([] if self._teachers is None else self._teachers.at_work())]


def joined(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return a step's metrics from those of its ranks: sums, but maxima for `LARGEST`."""
    total: dict[str, float] = {"sdpo/bytes": 0}
    for figures in ranks:
        for name, value in figures.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name in LARGEST else before + value
    return total


class RestoredTeachers:
    """Restores the SDPO teachers after a trainer restart.

    Their moving averages are identical, so one teacher copies and writes it.
    """

    def __init__(self, ranks: Ranks, teachers: SdpoTeachers, deadline_s: float) -> None:
        self._ranks, self._teachers, self._deadline_s = ranks, teachers, deadline_s
        self._keeper: SpawnedActor | None = None

    async def forget(self) -> None:
        """Drop what the former ranks requested."""
        await self._teachers.forget()

    async def follow(self) -> None:
        """Make the teachers pull the trainer's current weights."""
        ranks = self._ranks()
        handle = await published(ranks, self._deadline_s)
        await self._teachers.pull(handle, ranks[0])

    async def keep(self, version: int) -> None:
        """Have a teacher copy its average at a version, for `write`; raises `AverageLost`."""
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

    async def write(self, draft: Path) -> list[WrittenFile]:
        """Have the teacher write its copy. Waits until it is on disk; raises `AverageLost`."""
        if self._keeper is None:
            return []
        try:
            files: list[WrittenFile] = await self._keeper.call(
                "write", draft, deadline_s=WRITE_DEADLINE_S
            )
        except MeshError as error:
            raise AverageLost(str(error)) from error
        return files

    async def restore(self, checkpoint: Path | None, version: int) -> bool:
        """Load a checkpoint's average, None for the initial one; returns whether it exists."""
        file = None if checkpoint is None else checkpoint / AVERAGE_FILE
        if file is not None and not file.exists():
            return False
        await self.follow()  # or replacements would wait for weights that died with a rank
        await self._teachers.restore(version, file)
        return True
