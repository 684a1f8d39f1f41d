"""Checkpoint writing: one at a time, started between steps, written concurrently with training.

    begin     opens a draft; ranks, and one teacher if it holds an EMA, copy their state
    finish    waits until they have written it, commits the draft, prunes older checkpoints

The first write that fails is recorded as an event; the second failure in succession, and one of the
last step, ends the run. `fault_tolerant_trainer` decides when to checkpoint and handles deaths.

Retries concurrent work on shared processes after each repair; repairs run exclusively.

    attempt   ------x                    ----------> result        the fault
    attempt   --------x interrupted      ------> result            retried too
    repair            ===== exclusive ===

A fault that several attempts run into is repaired once. Callers define faults and repairs.

Protocols through which `FaultTolerantTrainer` uses the mesh.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_mesh.actors.checkpoints.folder import (
    Checkpoint,
    CheckpointDraft,
    CheckpointFailed,
    folder_of,
    newest_whole,
    prune,
)
from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import ActorDied, Recorder
from composer_mesh.mesh.waiting import cancel_and_wait, in_thread, together
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.logprob_mismatch import Metrics, Trained

FAILURES = 2
"""Number of successive checkpoint failures that ends the run."""


class AverageLost(Exception):
    """The moving average of SDPO teachers in separate processes cannot be saved."""


class CheckpointWrites:
    """Writes a run's checkpoints; holds the newest one and the one being written."""

    def __init__(
        self,
        config: Config,
        ranks: "CheckpointedRanks",
        teachers: "CheckpointedTeachers | None",
        root: Path,
        record: Recorder,
        resumed_from: Checkpoint | None,
    ) -> None:
        self._config, self._ranks, self._teachers = config, ranks, teachers
        self._root, self._record = root, record
        self._draft: CheckpointDraft | None = None
        self._failures = 0
        self.newest = resumed_from

    @property
    def under_way(self) -> int | None:
        """Step whose checkpoint is being written, or None."""
        return None if self._draft is None else self._draft.step

    async def look(self) -> None:
        """Quarantine damaged checkpoints; `newest` is intact afterwards. Waits until all is read.

        `newest` is None if no intact checkpoint exists.
        """
        if self.newest is not None:
            self.newest = await newest_undamaged(self._root.absolute(), self._record)

    async def begin(self, step: int) -> None:
        """Start the checkpoint of a step. Waits until its state is copied."""
        self._draft = None
        try:
            draft = CheckpointDraft(self._root.absolute(), step)
        except OSError as error:
            self._failed(step, error)
            return
        exports = self._config.trainer.checkpoint_export or step == self._config.run.steps
        copied = self._ranks.save(draft.folder, exports)
        await together(copied, self._keep_average(step))
        self._draft = draft

    async def finish(self) -> None:
        """Commit the checkpoint being written; it becomes `newest`. Waits until it is on disk."""
        draft = self._draft
        if draft is None:
            return
        try:
            found = await together(self._ranks.saved(), self._write_average(draft))
            await self._commit(draft, [one for files in found for one in files])
        except (CheckpointFailed, OSError) as error:
            self._draft = None
            await asyncio.to_thread(draft.discard)
            self._failed(draft.step, error)

    async def _keep_average(self, step: int) -> None:
        if self._teachers is not None:
            with self._reporting_lost_average(step):
                await self._teachers.keep(step)

    async def _write_average(self, draft: CheckpointDraft) -> list[WrittenFile]:
        if self._teachers is not None:
            with self._reporting_lost_average(draft.step):
                return await self._teachers.write(draft.folder)
        return []

    @contextmanager
    def _reporting_lost_average(self, step: int) -> Iterator[None]:
        """Turn `AverageLost` into an event: the checkpoint is written without the average."""
        try:
            yield
        except AverageLost as lost:
            detail = f"step {step}'s checkpoint is without the SDPO teachers' average: {lost}"
            self._record("average_not_kept", "", detail)

    async def _commit(self, draft: CheckpointDraft, files: list[WrittenFile]) -> None:
        """Commit in a thread, which cannot be stopped, so cancellation waits for it too."""
        work = asyncio.ensure_future(asyncio.to_thread(self._committed, draft, files))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                self._draft, self._failures, self.newest = None, 0, work.result()
                self._record("checkpoint", "trainer", str(folder_of(self._root, draft.step)))

    def _committed(self, draft: CheckpointDraft, files: list[WrittenFile]) -> Checkpoint:
        checkpoint, trainer = draft.commit(files), self._config.trainer
        last = draft.step == self._config.run.steps
        prune(self._root, trainer.checkpoints_kept + last, trainer.checkpoint_keep_every)
        return checkpoint

    def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        reason = error.args[1] if isinstance(error, CheckpointFailed) else str(error)
        failure = CheckpointFailed(str(folder_of(self._root, step)), reason)
        if self._failures >= FAILURES or step == self._config.run.steps:
            raise failure from error
        self._record("checkpoint_failed", "trainer", str(failure))


async def newest_undamaged(root: Path, record: Recorder) -> Checkpoint | None:
    """Return the newest intact checkpoint; quarantine and `record` the damaged newer ones.

    Reads every byte, in a thread.
    """
    found, aside = await in_thread(newest_whole, root)
    for one in aside:
        where = one.moved_to.relative_to(root)
        name = f"checkpoint of step {one.checkpoint.step}"
        record("quarantined", "", f"{name}: {'; '.join(one.damage)}; kept as {where}")
    return found


T = TypeVar("T")


Earlier = Callable[[int, int], list[Trained]]
"""Returns finished steps, from the first up to before the second, from the run's store.

Called in a thread. Raises, which ends the run, if a step cannot be rebuilt.
"""


class CheckpointedRanks(Protocol):
    """The trainer's processes, implemented by `TrainerRanks`."""

    async def save(self, draft: Path, export: bool) -> None: ...

    async def saved(self) -> list[WrittenFile]: ...

    async def restart_from(self, checkpoint: Path | None) -> int: ...

    async def guard(self, work: Coroutine[Any, Any, T]) -> T: ...

    async def cause_of(self, error: Exception) -> Exception: ...

    async def until_one_dies(self) -> None: ...

    def died(self) -> ActorDied | None: ...

    def names(self) -> list[str]: ...


class StepAttempt(Protocol):
    """One attempt at an optimizer step, implemented by `MeshTraining`.

    Trains version v+1 on the batch of version v, and refuses the batch of any other version.
    `teacher_outputs` is about SDPO teachers in separate processes. True: the step waits for the
    replacement of a lost one. False: none is queried, and a step with views counts itself in
    `sdpo/lost_steps`. None: `sdpo.when_lost` decides.
    """

    async def train(self, batch: StepBatch, teacher_outputs: bool | None = None) -> Metrics: ...


class CheckpointedTeachers(Protocol):
    """SDPO teachers in separate processes, as checkpoints and a trainer restart need them.

    One of them copies and writes their moving average: `keep` and `write` raise `AverageLost`.
    `forget` prepares them to serve replayed steps; `restore` resets a moving average to its state
    at a checkpoint, or at the run's start, and returns whether the checkpoint has one; `follow`
    makes them pull the trainer's current weights.
    """

    async def forget(self) -> None: ...

    async def restore(self, checkpoint: Path | None, version: int) -> bool: ...

    async def follow(self) -> None: ...

    async def keep(self, version: int) -> None: ...

    async def write(self, draft: Path) -> list[WrittenFile]: ...


Mend = Callable[[], Coroutine[Any, Any, None]]


class Attempts:
    """Retry loop of one event loop; a failed repair ends all attempts."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._repairs = 0
        self._failure: Exception | None = None

    async def insist(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        mend: Callable[[Exception], Coroutine[Any, Any, None]],
    ) -> T:
        """Return the result of `work`, retried after each repair. Waits for a running repair.

        An attempt either completes or has no effect: it must change state here only after its last
        `await`.
        """
        while True:
            async with self._alone:
                if self._failure is not None:
                    raise self._failure
                task, before = asyncio.ensure_future(work()), self._repairs
                self._under_way.add(task)
            if await self._interrupted(task):
                continue
            error = task.exception()
            if error is None:
                return task.result()
            if not isinstance(error, Exception):
                raise error
            found = error
            await self._repair(lambda: mend(found), before)  # noqa: B023  awaited at once

    async def repair(self, mend: Mend) -> None:
        """Repair a fault that no attempt has run into yet. Waits for a running repair.

        Raises the error of an earlier failed repair, after which nothing can be repaired.
        """
        await self._repair(mend, None)

    async def interrupt(self) -> None:
        """Cancel all running attempts, from within a repair; they are retried after it."""
        self._repairs += 1
        voided, self._under_way = self._under_way, set()
        await cancel_and_wait(voided)

    async def _repair(self, mend: Mend, before: int | None) -> None:
        """Repair, unless another repair has run since the count was `before`."""
        async with self._alone:
            if self._failure is not None:
                raise self._failure
            if before is not None and before != self._repairs:
                return
            try:
                await mend()
            except Exception as error:
                self._failure = error
                raise

    async def _interrupted(self, task: asyncio.Task[Any]) -> bool:
        """Wait until an attempt ends; return whether a repair cancelled it."""
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await cancel_and_wait([task])
            raise
        finally:
            ours = task not in self._under_way
            self._under_way.discard(task)
        return ours and task.cancelled()
