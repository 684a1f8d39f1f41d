"""Training that outlives its ranks: what a death undid is done again, from the newest checkpoint.

    steps trained     c-1 | c   c+1  ...  s-1 | s under way
    checkpoint            ^
    after a death         load c, train c ... s-1 again, serve s again, then s

The batches since the checkpoint are kept here, so nothing is sampled twice and versions go on from
s. A step, and the sync of the version before it, may be under way together: a death interrupts both
and is mended once; then the newest version is served, and the step tried again. Replayed steps are
trained as they were the first time, with the teachers' signals too: the teachers follow the trainer
through its versions once more, a moving average from where it was at the checkpoint. Where that is
lost, steps that had its signals are trained without them. What has become different is said by the
event `trainer_restarted`.

Checkpoints are written beside the steps. A step's batch is kept until a checkpoint after it is on
disk; one that a death interrupted is written when its step has been trained again. Where the newest
one turns out to be damaged, the one before it takes its place, and the store gives the steps since.

What a rank is, a step, or a pull, is not known here.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from composer_mesh.actors.checkpoints.folder import Checkpoint, CheckpointFailed
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import cause_of, error_key, is_deterministic
from composer_mesh.mesh.supervision import ActorDied, MeshError
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.ports import MayTrain, WeightSync
from composer_mesh.services.steps.recomputation_check import Differences, Metrics, Trained
from composer_mesh.services.training.attempts import Attempts
from composer_mesh.services.training.checkpoint_writes import CheckpointWrites
from composer_mesh.services.training.ports import Earlier, Ranks, Step, Teachers
from composer_mesh.services.training.teaching import Record

T = TypeVar("T")


class FaultTolerantTrainer:
    """The ports `Training` and `WeightSync` of a run, and its checkpoints.

    `teachers` is None where none live in processes of their own.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        step: Step,
        weights: WeightSync,
        teachers: Teachers | None,
        root: Path,
        record: Record,
        earlier: Earlier,
        resumed_from: Checkpoint | None = None,
    ) -> None:
        self._config, self._ranks, self._step = config, ranks, step
        self._weights, self._teachers = weights, teachers
        self._record, self._earlier = record, earlier
        self._average = teachers if config.sdpo.teacher == "ema" else None
        self._writes = CheckpointWrites(config, ranks, self._average, root, record, resumed_from)
        self._writing: asyncio.Task[None] | None = None
        self._stall_s = 0.0
        self._since: list[Trained] = []
        self._behind = False
        self._version = 0 if resumed_from is None else resumed_from.step
        self._serves, self._served = False, -1
        self._failed: tuple[int, str] | None = None
        self._attempts = Attempts()
        self.restarts = 0

    async def train(self, batch: StepBatch) -> Metrics:
        """Make the next version out of a batch. Waits for a restart where a rank has died."""
        return await self._attempts.insist(lambda: self._train(batch), self._recover)

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Serve the newest version everywhere; returns it. A step may be trained beside it."""
        self._serves = True
        return await self._attempts.insist(lambda: self._sync(on_snapshot), self._recover)

    async def save(self, step: int) -> None:
        """Begin the checkpoint of a step. Waits for the one before it, and until all is copied.

        The last one of a run is on disk when this returns.
        """
        began = time.monotonic()
        await self.saved()
        await self._attempts.insist(lambda: self._begin_write(step), self._recover)
        self._stall_s += time.monotonic() - began
        finishing = self._attempts.insist(self._finish_write, self._recover)
        self._writing = asyncio.create_task(finishing)
        if step == self._config.run.steps:
            await self.saved()

    async def saved(self) -> None:
        """Wait until the checkpoint of the newest `save` is on disk."""
        if self._writing is not None:
            await self._writing

    async def catch_up(self, past: Sequence[Trained]) -> None:
        """Train the steps after the checkpoint that the run begins with once more, in their order.

        Called once, when the ranks are loaded and before anything else; the first sync serves what
        they come to. The event `run_caught_up` compares the steps with their first time.
        """
        self._since, self._behind = list(past), bool(past or self._writes.newest)
        self._version += len(past)
        await self._attempts.insist(self._catch_up, self._recover)
        if not self._config.trainer.checkpoint_every:
            self._since = []

    async def _catch_up(self) -> None:
        """A restart has trained the steps too: what it interrupted has nothing left to do."""
        if self._behind:
            differs = await self._ranks.guard(self._retrain(self._due()))
            if differs.steps:
                detail = f"{differs}, goes on at version {self._version}"
                self._record("run_caught_up", self._ranks.names()[0], detail)
        self._behind = False

    async def _train(self, batch: StepBatch) -> Metrics:
        metrics = await self._ranks.guard(self._step.train(batch))
        self._version += 1
        if self._config.trainer.checkpoint_every:
            self._since.append(Trained(batch, metrics))
        stalled, self._stall_s = self._stall_s, 0.0
        return {**metrics, "time/checkpoint_stall_s": stalled}

    async def _sync(self, on_snapshot: MayTrain | None) -> int:
        """A restart serves the newest version too: what it interrupted has nothing left to do."""
        if self._served != self._version:
            self._served = await self._ranks.guard(self._weights.sync(on_snapshot))
        return self._served

    async def _begin_write(self, step: int) -> None:
        await self._ranks.guard(self._writes.begin(step))

    async def _finish_write(self) -> None:
        await self._ranks.guard(self._writes.finish())
        self._forget_saved()

    def _forget_saved(self) -> None:
        """Batches that no restart will need, because a checkpoint came after them."""
        if (newest := self._writes.newest) is not None:
            self._since = [one for one in self._since if one.batch.step >= newest.step]

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what needs a trainer; one that dies is replaced at once, also while nobody trains.

        What may not be replaced ends the work with its cause.
        """
        task, watching = asyncio.ensure_future(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait([task, watching], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watching.result()
            return await task
        finally:
            writing = [] if self._writing is None else [self._writing]
            await cancel_and_wait([task, watching, *writing])

    async def _watch(self) -> None:
        while True:
            await self._ranks.until_one_dies()
            await self._attempts.repair(self._replace_dead)

    async def _replace_dead(self) -> None:
        if (died := self._ranks.died()) is not None:
            await self._recover(died)

    async def _recover(self, error: Exception) -> None:
        """Bring new ranks to the version that was lost. Raises the cause where that may not be."""
        cause = await self._ranks.cause_of(error)
        while True:
            self._check(cause)
            self.restarts += 1
            await self._attempts.interrupt()
            await self._find_begin()
            try:
                await self._begin_again(cause)
            except Exception as failed:  # noqa: BLE001  supervision boundary: judged by _check
                cause = await self._ranks.cause_of(failed)
            else:
                return

    async def _begin_again(self, cause: Exception) -> None:
        folder, resumed_from = self._begun()
        version = await self._ranks.begin_again(folder)
        if version != resumed_from:
            raise RuntimeError(
                f"the checkpoint of step {resumed_from} holds version {version}: move it away"
            )
        if self._teachers is not None:
            await self._ranks.guard(self._teachers.forget())
        again = self._due() if self._behind else self._writes.under_way
        differs = await self._ranks.guard(self._retrain(again))
        self._behind = False
        if self._serves:
            self._served = await self._ranks.guard(self._weights.sync())
        self._tell(cause, resumed_from, differs)

    async def _find_begin(self) -> None:
        """Never begin from a damaged checkpoint, but from one before it, with more steps.

        Raises what is wrong where the run's directory does not give them: no restart would help.
        """
        await self._writes.look()
        self._forget_saved()
        resumed_from = self._begun()[1]
        first = self._since[0].batch.step if self._since else self._version
        if resumed_from < first:
            again = await asyncio.to_thread(self._earlier, resumed_from, first)
            if [one.batch.step for one in again] != list(range(resumed_from, first)):
                raise RuntimeError(
                    f"the run's store has not all steps from {resumed_from} to {first}: go on with "
                    "--resume, which begins where it has them"
                )
            self._since = [*again, *self._since]

    async def _retrain(self, save: int | None) -> Differences:
        """Train the steps since the checkpoint once more, as they were trained then.

        The checkpoint of the step `save` is written when that has been trained.
        """
        found, average = Differences(), self._average is not None
        teachers = self._teachers
        if self._average is not None and not await self._average.restore(*self._begun()):
            teachers = None
        for past in list(self._since):
            if teachers is not None and (past.taught or average):
                await teachers.follow()
            teacher_outputs = past.taught and teachers is not None
            found.note(past, await self._step.train(past.batch, teacher_outputs))
            if past.batch.step + 1 == save:
                if teachers is not None and average:
                    await teachers.follow()
                await self._writes.begin(save)
                await self._writes.finish()
                self._forget_saved()
        return found

    def _begun(self) -> tuple[Path | None, int]:
        """The checkpoint that training begins again from, and its version."""
        newest = self._writes.newest
        return (None, 0) if newest is None else (newest.folder, newest.step)

    def _due(self) -> int | None:
        """The newest step of those behind whose checkpoint should be there."""
        every = self._config.trainer.checkpoint_every
        return self._version // every * every if every else None

    def _check(self, cause: Exception) -> None:
        """Raise what ends the run: others' deaths, errors that come again, the budget's end."""
        if isinstance(cause, MeshError) and getattr(cause, "actor", "") not in self._ranks.names():
            raise cause
        if isinstance(cause, CheckpointFailed):
            raise cause  # no other process would have a better disk
        if is_deterministic(cause):
            error = (self._version, error_key(cause))
            if error == self._failed:
                raise cause
            self._failed = error
        if not self._config.trainer.checkpoint_every:
            raise _with(cause, "no checkpoint to begin again from: set trainer.checkpoint_every")
        if self.restarts >= self._config.supervision.trainer_restarts:
            times = f"{self.restarts} restarts of the trainer have not helped"
            raise _with(cause, times) if self.restarts else cause

    def _tell(self, cause: Exception, resumed_from: int, differs: Differences) -> None:
        where = f"step {resumed_from}'s checkpoint" if resumed_from else "the start"
        detail = (
            f"{told(cause)}; began again from {where}, {differs}, goes on at version "
            f"{self._version}"
        )
        self._record("trainer_restarted", self._ranks.names()[0], detail)


def told(cause: Exception) -> str:
    """A cause in one line of an event; a death names its actor, so it needs no type."""
    return " ".join(str(cause).split()) if isinstance(cause, ActorDied) else cause_of(cause)


def _with(cause: Exception, why: str) -> Exception:
    """The cause with what makes it final, where it is a death; another error says enough."""
    if isinstance(cause, ActorDied):
        return ActorDied(cause.actor, f"{cause.reason}; {why}")
    return cause
