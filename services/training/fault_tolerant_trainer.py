"""Training that survives rank deaths by replaying steps from the newest checkpoint.

    steps trained     c-1 | c   c+1  ...  s-1 | s running
    checkpoint            ^
    after a death         load c, replay c ... s-1, serve s again, then train s

The batches since the checkpoint are stored here, so nothing is sampled twice and versions continue
from s. A step and the sync of the version before it may run concurrently: a death interrupts both
and is repaired once; then the newest version is served, and the step is retried. Replayed steps are
trained as before, including teacher outputs: the teachers pull the trainer's versions again, a
moving average starts from its state at the checkpoint, and a step that had teacher outputs waits
for the replacement of a lost teacher. If the average is lost, such steps are trained without them.
The event `trainer_restarted` reports the differences.

Checkpoints are written concurrently with steps. A step's batch is stored until a later checkpoint
is on disk; a checkpoint that a death interrupted is written when its step has been replayed. If the
newest one is damaged, the one before it is used, and the run's store supplies the steps since.

Where processes share GPUs in turns, each attempt first takes the turn that it needs, so that it is
right whatever was interrupted before it. A restart takes the devices from the generators.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from composer_mesh.actors.checkpoints.folder import Checkpoint, CheckpointFailed
from composer_mesh.actors.learning.weight_update import GradientNotFinite
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import cause_of, error_key, is_deterministic, states_its_cause
from composer_mesh.mesh.supervision import ActorDied, MeshError, Recorder
from composer_mesh.mesh.waiting import cancel_and_wait, unless
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.logprob_mismatch import Differences, Metrics, Trained
from composer_mesh.services.steps.ports import MayTrain, WeightSync
from composer_mesh.services.training.checkpoint_writes import (
    Attempts,
    CheckpointedRanks,
    CheckpointedTeachers,
    CheckpointWrites,
    Earlier,
    StepAttempt,
)
from composer_mesh.services.training.turns import NoTurns, Turns

T = TypeVar("T")


class FaultTolerantTrainer:
    """Implements the ports `Training` and `WeightSync`, and writes checkpoints.

    `teachers` is None unless SDPO teachers run in separate processes.
    """

    def __init__(
        self,
        config: Config,
        ranks: CheckpointedRanks,
        step: StepAttempt,
        weights: WeightSync,
        teachers: CheckpointedTeachers | None,
        root: Path,
        record: Recorder,
        earlier: Earlier,
        resumed_from: Checkpoint | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns or NoTurns()
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
        """Train a batch into the next version. Waits for a restart if a rank has died."""
        return await self._attempts.insist(lambda: self._train(batch), self._recover)

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Serve the newest version everywhere and return it. A step may be trained concurrently."""
        self._serves = True
        return await self._attempts.insist(lambda: self._sync(on_snapshot), self._recover)

    async def save(self, step: int) -> None:
        """Start the checkpoint of a step. Waits for the previous one and until its state is copied.

        The run's last checkpoint is on disk when this returns.
        """
        began = time.monotonic()
        await self.saved()
        await self._attempts.insist(
            lambda: self._ranks.guard(self._begin_write(step)), self._recover
        )
        if self._config.placement.colocate:
            give_back = self._turns.sample
            await self._attempts.insist(lambda: self._ranks.guard(give_back()), self._recover)
        self._stall_s += time.monotonic() - began
        finishing = self._attempts.insist(self._finish_write, self._recover)
        self._writing = asyncio.create_task(finishing)
        if step == self._config.run.steps:
            await self.saved()

    async def _begin_write(self, step: int) -> None:
        await self._turns.train()
        await self._writes.begin(step)

    async def saved(self) -> None:
        """Wait until the checkpoint of the newest `save` is on disk."""
        if self._writing is not None:
            await self._writing

    async def catch_up(self, past: Sequence[Trained]) -> None:
        """Replay the steps after the checkpoint that a resumed run starts from, in order.

        Called once, after the ranks are loaded and before anything else; the first sync serves the
        resulting version. The event `run_caught_up` compares the steps with their first training.
        """
        self._since, self._behind = list(past), bool(past or self._writes.newest)
        self._version += len(past)
        await self._attempts.insist(self._catch_up, self._recover)
        if not self._config.trainer.checkpoint_every:
            self._since = []

    async def _catch_up(self) -> None:
        """Replay the steps, unless an interrupting restart has already done so."""
        if self._behind:
            differs = await self._ranks.guard(self._retrain(self._due()))
            if differs.steps:
                detail = f"{differs}, continues at version {self._version}"
                self._record("run_caught_up", self._ranks.names()[0], detail)
        self._behind = False

    async def _train(self, batch: StepBatch) -> Metrics:
        metrics = await self._ranks.guard(self._train_in_turn(batch))
        self._version += 1
        if self._config.trainer.checkpoint_every:
            self._since.append(Trained(batch, metrics))
        stalled, self._stall_s = self._stall_s, 0.0
        return {**metrics, "time/checkpoint_stall_s": stalled}

    async def _train_in_turn(self, batch: StepBatch) -> Metrics:
        await self._turns.train()
        return await self._step.train(batch)

    async def _sync(self, on_snapshot: MayTrain | None) -> int:
        """Sync, unless an interrupting restart has already served the newest version."""
        if self._served != self._version:
            self._served = await self._ranks.guard(self._serve(on_snapshot))
        return self._served

    async def _serve(self, on_snapshot: MayTrain | None = None) -> int:
        await self._turns.train()
        served = await self._weights.sync(on_snapshot)
        await self._turns.sample()
        return served

    async def _finish_write(self) -> None:
        await self._ranks.guard(self._writes.finish())
        self._forget_saved()

    def _forget_saved(self) -> None:
        """Drop the batches that a newer checkpoint makes unnecessary."""
        if (newest := self._writes.newest) is not None:
            self._since = [one for one in self._since if one.batch.step >= newest.step]

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, replacing dead ranks at once, even between steps.

        Raises the cause if a rank may not be replaced.
        """
        watching = asyncio.create_task(self._watch())
        try:
            return await unless(work, [watching], watching.exception)
        finally:
            writing = [] if self._writing is None else [self._writing]
            await cancel_and_wait([watching, *writing])

    async def _watch(self) -> None:
        while True:
            await self._ranks.until_one_dies()
            await self._attempts.repair(self._replace_dead)

    async def _replace_dead(self) -> None:
        if (died := self._ranks.died()) is not None:
            await self._recover(died)

    async def _recover(self, error: Exception) -> None:
        """Restart the ranks at the lost version. Raises the cause if they may not restart."""
        cause = await self._ranks.cause_of(error)
        while True:
            self._check(cause)
            self.restarts += 1
            await self._attempts.interrupt()
            await self._find_begin()
            try:
                await self._restart(cause)
            except Exception as failed:  # noqa: BLE001  supervision boundary: judged by _check
                cause = await self._ranks.cause_of(failed)
            else:
                return

    async def _restart(self, cause: Exception) -> None:
        folder, resumed_from = self._begun()
        await self._turns.clear()
        version = await self._ranks.restart_from(folder)
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
            self._served = await self._ranks.guard(self._serve())
        self._tell(cause, resumed_from, differs)

    async def _find_begin(self) -> None:
        """Find an intact checkpoint to restart from, and load the steps since it from the store.

        Raises if the run directory does not have these steps, since no restart would help.
        """
        await self._writes.look()
        self._forget_saved()
        resumed_from = self._begun()[1]
        first = self._since[0].batch.step if self._since else self._version
        if resumed_from < first:
            again = await asyncio.to_thread(self._earlier, resumed_from, first)
            if [one.batch.step for one in again] != list(range(resumed_from, first)):
                raise RuntimeError(
                    f"the run's store has not all steps from {resumed_from} to {first}: continue "
                    "with --resume, which begins where it has them"
                )
            self._since = [*again, *self._since]

    async def _retrain(self, save: int | None) -> Differences:
        """Replay the steps since the checkpoint with their original batches.

        The checkpoint of step `save` is written when that step has been replayed.
        """
        await self._turns.train()
        found, average = Differences(), self._average is not None
        teachers, lost = self._teachers, False
        if self._average is not None and not await self._average.restore(*self._begun()):
            teachers, lost = None, True
        for past in list(self._since):
            if teachers is not None and (past.taught or average):
                await teachers.follow()
            teacher_outputs = past.taught and not lost
            found.note(past, await self._step.train(past.batch, teacher_outputs))
            if past.batch.step + 1 == save:
                if teachers is not None and average:
                    await teachers.follow()
                await self._writes.begin(save)
                await self._writes.finish()
                self._forget_saved()
        return found

    def _begun(self) -> tuple[Path | None, int]:
        """Return the checkpoint that training restarts from, and its version."""
        newest = self._writes.newest
        return (None, 0) if newest is None else (newest.folder, newest.step)

    def _due(self) -> int | None:
        """Return the newest replayed step that should have a checkpoint."""
        every = self._config.trainer.checkpoint_every
        return self._version // every * every if every else None

    def _check(self, cause: Exception) -> None:
        """Raise errors that end the run: other actors' deaths, repeated errors, a spent budget."""
        if isinstance(cause, MeshError) and getattr(cause, "actor", "") not in self._ranks.names():
            raise cause
        if isinstance(cause, CheckpointFailed):
            raise cause  # another process would use the same disk
        if isinstance(cause, GradientNotFinite):
            self._record(
                "gradient_not_finite", self._ranks.names()[0], str(cause), **cause.fields()
            )
        if states_its_cause(cause):
            raise cause  # another process would fail alike
        if is_deterministic(cause):
            error = (self._version, error_key(cause))
            if error == self._failed:
                raise cause
            self._failed = error
        if not self._config.trainer.checkpoint_every:
            raise _with(cause, "no checkpoint to restart from: set trainer.checkpoint_every")
        if self.restarts >= self._config.supervision.trainer_restarts:
            times = f"{self.restarts} restarts of the trainer have not helped"
            raise _with(cause, times) if self.restarts else cause

    def _tell(self, cause: Exception, resumed_from: int, differs: Differences) -> None:
        where = f"step {resumed_from}'s checkpoint" if resumed_from else "the start"
        detail = (
            f"{one_line(cause)}; began again from {where}, {differs}, continues at version "
            f"{self._version}"
        )
        self._record("trainer_restarted", self._ranks.names()[0], detail)


def one_line(cause: Exception) -> str:
    """Return a cause as one line for an event; a death names its actor, so it needs no type."""
    return " ".join(str(cause).split()) if isinstance(cause, ActorDied) else cause_of(cause)


def _with(cause: Exception, why: str) -> Exception:
    """Append to a death the reason why it is final; other errors are returned unchanged."""
    if isinstance(cause, ActorDied):
        return ActorDied(cause.actor, f"{cause.reason}; {why}")
    return cause
