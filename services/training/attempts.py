"""Retries concurrent work on shared processes after each repair; repairs run exclusively.

    attempt   ------x                    ----------> result        the fault
    attempt   --------x interrupted      ------> result            retried too
    repair            ===== exclusive ===

A fault that several attempts run into is repaired once. Callers define faults and repairs.

Protocols through which `FaultTolerantTrainer` uses the mesh.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.logprob_mismatch import Metrics, Trained
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
