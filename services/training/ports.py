"""Ports that the fault-tolerant trainer needs, implemented by fakes and by real processes.

No behaviour here.
"""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.recomputation_check import Metrics, Trained
from composer_mesh.services.training.checkpoint_writes import KeepsAverage, Writer

T = TypeVar("T")


Earlier = Callable[[int, int], list[Trained]]
"""Steps that are done, from the first up to before the second, read from the run's store.

Called in a thread. Raises what ends the run where one cannot be made again.
"""


class Ranks(Writer, Protocol):
    """The processes that train, as `TrainerRanks` has them."""

    async def begin_again(self, checkpoint: Path | None) -> int: ...

    async def guard(self, work: Coroutine[Any, Any, T]) -> T: ...

    async def cause_of(self, error: Exception) -> Exception: ...

    async def until_one_dies(self) -> None: ...

    def died(self) -> ActorDied | None: ...

    def names(self) -> list[str]: ...


class Step(Protocol):
    """One try of an optimizer step, as `MeshTraining` makes it."""

    async def train(self, batch: StepBatch, teacher_outputs: bool = True) -> Metrics: ...


class Teachers(KeepsAverage, Protocol):
    """Teachers in processes of their own, as far as a restart of the trainer concerns them.

    `forget` makes them ready for steps that they have served before, `restore` gives an average
    what it was at a checkpoint, or at the run's start, and tells whether it could; `follow` brings
    them the weights that the trainer has now.
    """

    async def forget(self) -> None: ...

    async def restore(self, checkpoint: Path | None, version: int) -> bool: ...

    async def follow(self) -> None: ...
