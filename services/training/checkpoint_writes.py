"""Checkpoint writing: one at a time, started between steps, written concurrently with training.

    begin     opens a draft; ranks, and one teacher if it holds an EMA, copy their state
    finish    waits until they have written it, commits the draft, prunes older checkpoints

The first write that fails is recorded as an event; the second failure in succession, and one of the
last step, ends the run. `fault_tolerant_trainer` decides when to checkpoint and handles deaths.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from composer_mesh.actors.checkpoints.folder import (
    Checkpoint,
    CheckpointFailed,
    Draft,
    folder_of,
    newest_whole,
    prune,
)
from composer_mesh.actors.checkpoints.manifest import Written
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.waiting import in_thread, together

FAILURES = 2
"""Number of successive checkpoint failures that ends the run."""


class Writer(Protocol):
    """The trainer ranks as checkpoint writers."""

    async def save(self, draft: Path, export: bool) -> None: ...

    async def saved(self) -> list[Written]: ...


class AverageLost(Exception):
    """The moving average of SDPO teachers in separate processes cannot be saved."""


class KeepsAverage(Protocol):
    """SDPO teachers in separate processes: one of them copies and writes their moving average.

    Both methods raise `AverageLost`.
    """

    async def keep(self, version: int) -> None: ...

    async def write(self, draft: Path) -> list[Written]: ...


class CheckpointWrites:
    """Writes a run's checkpoints; holds the newest one and the one being written."""

    def __init__(
        self,
        config: Config,
        ranks: Writer,
        teachers: KeepsAverage | None,
        root: Path,
        record: Recorder,
        resumed_from: Checkpoint | None,
    ) -> None:
        self._config, self._ranks, self._teachers = config, ranks, teachers
        self._root, self._record = root, record
        self._draft: Draft | None = None
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
            draft = Draft(self._root.absolute(), step)
        except OSError as error:
            self._failed(step, error)
            return
        copied = self._ranks.save(draft.folder, self._exports(step))
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
            with self._told(step):
                await self._teachers.keep(step)

    async def _write_average(self, draft: Draft) -> list[Written]:
        if self._teachers is not None:
            with self._told(draft.step):
                return await self._teachers.write(draft.folder)
        return []

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """Turn `AverageLost` into an event: the checkpoint is written without the average."""
        try:
            yield
        except AverageLost as lost:
            detail = f"step {step}'s checkpoint is without the SDPO teachers' average: {lost}"
            self._record("average_not_kept", "", detail)

    async def _commit(self, draft: Draft, files: list[Written]) -> None:
        """Commit in a thread, which cannot be stopped, so cancellation waits for it too."""
        work = asyncio.ensure_future(asyncio.to_thread(self._committed, draft, files))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                self._draft, self._failures, self.newest = None, 0, work.result()
                self._record("checkpoint", "trainer", str(folder_of(self._root, draft.step)))

    def _committed(self, draft: Draft, files: list[Written]) -> Checkpoint:
        checkpoint, trainer = draft.commit(files), self._config.trainer
        last = draft.step == self._config.run.steps
        prune(self._root, trainer.checkpoints_kept + last, trainer.checkpoint_keep_every)
        return checkpoint

    def _exports(self, step: int) -> bool:
        return self._config.trainer.checkpoint_export or step == self._config.run.steps

    def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        reason = error.args[1] if isinstance(error, CheckpointFailed) else str(error)
        told = CheckpointFailed(str(folder_of(self._root, step)), reason)
        if self._failures >= FAILURES or step == self._config.run.steps:
            raise told from error
        self._record("checkpoint_failed", "trainer", str(told))


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
