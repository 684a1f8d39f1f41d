"""Protocols through which `FaultTolerantTrainer` uses the mesh."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.recomputation_check import Metrics, Trained
from composer_mesh.services.training.checkpoint_writes import KeepsAverage, Writer

T = TypeVar("T")


Earlier = Callable[[int, int], list[Trained]]
"""Returns finished steps, from the first up to before the second, from the run's store.

Called in a thread. Raises, which ends the run, if a step cannot be rebuilt.
"""


class Ranks(Writer, Protocol):
    """The trainer's processes, implemented by `TrainerRanks`."""

    async def begin_again(self, checkpoint: Path | None) -> int: ...

    async def guard(self, work: Coroutine[Any, Any, T]) -> T: ...

    async def cause_of(self, error: Exception) -> Exception: ...

    async def until_one_dies(self) -> None: ...

    def died(self) -> ActorDied | None: ...

    def names(self) -> list[str]: ...


class Step(Protocol):
    """One attempt at an optimizer step, implemented by `MeshTraining`.

    Trains version v+1 on the batch of version v, and refuses the batch of any other version.
    `teacher_outputs` is about SDPO teachers in separate processes. True: the step waits for the
    replacement of a lost one. False: none is queried, and a step with views counts itself in
    `sdpo/lost_steps`. None: `sdpo.when_lost` decides.
    """

    async def train(self, batch: StepBatch, teacher_outputs: bool | None = None) -> Metrics: ...


class Teachers(KeepsAverage, Protocol):
    """SDPO teachers in separate processes, as a trainer restart needs them.

    `forget` prepares them to serve replayed steps; `restore` resets a moving average to its state
    at a checkpoint, or at the run's start, and returns whether the checkpoint has one; `follow`
    makes them pull the trainer's current weights.
    """

    async def forget(self) -> None: ...

    async def restore(self, checkpoint: Path | None, version: int) -> bool: ...

    async def follow(self) -> None: ...
