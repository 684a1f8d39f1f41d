"""Training that outlives its ranks: what a death undid is done again, from the newest checkpoint.

    steps trained     c-1 | c   c+1  ...  s-1 | s under way
    checkpoint            ^
    after a death         load c, train c ... s-1 again, serve s again, then s

The batches since the checkpoint are kept here, so nothing is sampled twice and versions go on from
s. A step, and the sync of the version before it, may be under way together: a death interrupts both
and is mended once; then the newest version is served, and the step tried again. Replayed steps are
trained as they were the first time, with the teachers' signals too: the teachers follow the trainer
through its versions once more. A moving average cannot, because it has moved on; steps that had its
signals are trained without them. What has become different is said by the event
`trainer_restarted`.

What a rank is, a step, or a pull, is not known here.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_mesh.actors.checkpoint_folder import KEPT, Checkpoint, folder_of, prune
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import cause_of, error_key, is_deterministic
from composer_mesh.mesh.supervision import ActorDied, MeshError
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.attempts import Attempts
from composer_mesh.services.ports import MayTrain, WeightSync
from composer_mesh.services.teaching import Record

T = TypeVar("T")
Metrics = dict[str, Any]
COMPARED = ("loss/total", "policy/grad_norm")
"""What tells whether a step that was trained again was trained as before."""


class Ranks(Protocol):
    """The processes that train, as `TrainerRanks` has them."""

    async def save(self, folder: Path) -> None: ...

    async def begin_again(self, checkpoint: Path | None) -> int: ...

    async def guard(self, work: Coroutine[Any, Any, T]) -> T: ...

    async def cause_of(self, error: Exception) -> Exception: ...

    async def until_one_dies(self) -> None: ...

    def died(self) -> ActorDied | None: ...

    def names(self) -> list[str]: ...


class Step(Protocol):
    """One try of an optimizer step, as `MeshTraining` makes it."""

    async def train(self, batch: StepBatch, signals: bool = True) -> Metrics: ...


class Teachers(Protocol):
    """Teachers in processes of their own, as far as a restart of the trainer concerns them.

    `forget` makes them ready for steps that they have served before, `follow` brings them the
    weights that the trainer has now.
    """

    async def forget(self) -> None: ...

    async def follow(self) -> None: ...


@dataclass(frozen=True)
class Trained:
    """A step since the checkpoint: what was trained, and what came of it."""

    batch: StepBatch
    metrics: Metrics

    @property
    def taught(self) -> bool:
        """Whether teachers of the mesh had a part in it."""
        return bool(self.batch.views) and not self.metrics.get("sdpo/lost_steps")


class LastingTrainer:
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
        begun: Checkpoint | None = None,
    ) -> None:
        self._config, self._ranks, self._step = config, ranks, step
        self._weights, self._teachers = weights, teachers
        self._root, self._record = root, record
        self._place = root.absolute()
        self._checkpoint = begun
        self._since: list[Trained] = []
        self._version = 0 if begun is None else begun.step
        self._serves, self._served = False, -1
        self._failed: tuple[int, str] | None = None
        self._attempts = Attempts()
        self.restarts = 0

    async def train(self, batch: StepBatch) -> Metrics:
        """Make the next version out of a batch. Waits for a restart where a rank has died."""
        return await self._attempts.insist(lambda: self._train(batch), self._recover)

    async def sync(self, may_train: MayTrain | None = None) -> int:
        """Serve the newest version everywhere; returns it. A step may be trained beside it."""
        self._serves = True
        return await self._attempts.insist(lambda: self._sync(may_train), self._recover)

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step; old ones go, and so does what is kept of their steps."""
        await self._attempts.insist(lambda: self._save(step), self._recover)

    async def _train(self, batch: StepBatch) -> Metrics:
        metrics = await self._ranks.guard(self._step.train(batch))
        self._version += 1
        if self._config.trainer.checkpoint_every:
            self._since.append(Trained(batch, metrics))
        return metrics

    async def _sync(self, may_train: MayTrain | None) -> int:
        """A restart serves the newest version too: what it interrupted has nothing left to do."""
        if self._served != self._version:
            self._served = await self._ranks.guard(self._weights.sync(may_train))
        return self._served

    async def _save(self, step: int) -> None:
        folder = folder_of(self._root, step)
        await self._ranks.guard(self._ranks.save(folder_of(self._place, step)))
        self._checkpoint = Checkpoint(step, folder_of(self._place, step))
        self._since = []
        prune(self._root, KEPT + (step == self._config.run.steps))
        self._record("checkpoint", "trainer", str(folder))

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
            await cancel_and_wait([task, watching])

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
            try:
                await self._begin_again(cause)
            except Exception as failed:  # noqa: BLE001  supervision boundary: judged by _check
                cause = await self._ranks.cause_of(failed)
            else:
                return

    async def _begin_again(self, cause: Exception) -> None:
        checkpoint = self._checkpoint
        folder, begun = (checkpoint.folder, checkpoint.step) if checkpoint else (None, 0)
        version = await self._ranks.begin_again(folder)
        if version != begun:
            raise RuntimeError(
                f"the checkpoint of step {begun} holds version {version}: move it away"
            )
        if self._teachers is not None:
            await self._ranks.guard(self._teachers.forget())
        differs = await self._ranks.guard(self._replay())
        if self._serves:
            self._served = await self._ranks.guard(self._weights.sync())
        self._tell(cause, differs)

    async def _replay(self) -> "Differences":
        """Train the steps since the checkpoint once more, as they were trained then."""
        found = Differences()
        follows = self._teachers is not None and self._config.sdpo.teacher != "ema"
        for past in self._since:
            signals = past.taught and follows
            if signals and self._teachers is not None:
                await self._teachers.follow()
            found.note(past, await self._step.train(past.batch, signals))
        return found

    def _check(self, cause: Exception) -> None:
        """Raise what ends the run: others' deaths, errors that come again, the budget's end."""
        if isinstance(cause, MeshError) and getattr(cause, "actor", "") not in self._ranks.names():
            raise cause
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

    def _tell(self, cause: Exception, differs: "Differences") -> None:
        begun = f"step {self._checkpoint.step}'s checkpoint" if self._checkpoint else "the start"
        count = len(self._since)
        steps = f"{count} step{'s' * (count != 1)}"
        detail = (
            f"{told(cause)}; began again from {begun}, {steps} trained again"
            f"{differs if count else ''}, goes on at version {self._version}"
        )
        self._record("trainer_restarted", self._ranks.names()[0], detail)


@dataclass
class Differences:
    """What was not the same when steps were trained again."""

    untaught: int = 0
    largest: float = 0.0

    def note(self, past: Trained, again: Metrics) -> None:
        """Compare a step with its first time."""
        self.untaught += past.taught and bool(again.get("sdpo/lost_steps"))
        for name in COMPARED:
            was, now = past.metrics.get(name), again.get(name)
            if was is not None and now is not None:
                self.largest = max(self.largest, abs(now - was) / max(abs(was), 1e-12))

    def __str__(self) -> str:
        if self.untaught:
            return (
                f", {self.untaught} of them without their SDPO signals, so its version is served "
                f"anew: losses and gradients differ by up to {self.largest:.1%}"
            )
        if self.largest:
            return f", whose losses and gradients differ by up to {self.largest:.1g} of their size"
        return " to the same losses and gradients"


def told(cause: Exception) -> str:
    """A cause in one line of an event; a death names its actor, so it needs no type."""
    return " ".join(str(cause).split()) if isinstance(cause, ActorDied) else cause_of(cause)


def _with(cause: Exception, why: str) -> Exception:
    """The cause with what makes it final, where it is a death; another error says enough."""
    if isinstance(cause, ActorDied):
        return ActorDied(cause.actor, f"{cause.reason}; {why}")
    return cause
