"""Stopping a run early: immediately, or after writing a checkpoint.

    stop       waits for rollouts or an evaluation are abandoned
               a step that is being trained is finished
               its checkpoint is written, then the run is shut down in order
    stop now   everything is abandoned

A run that has not started to train, or a partial run, has nothing to finish and ends at once. A
signal's request is carried out within a bounded time; SIGINT, or a second signal, ends the run at
once. The shutdown itself is never interrupted.
"""

import asyncio
import signal
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.services.schedule.signals import CommandSignals

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit status of a run stopped by SIGTERM or by a command."""
GRACE_S = 60.0
"""Longest time after SIGTERM that a checkpoint is waited for."""
TAKE_DOWN_S = 30.0
"""Part of Slurm's grace period that is reserved for shutting the run down."""


class StopAsked(Exception):
    """Raised when work is abandoned because of a stop request."""


def grace_s(config: Config) -> float:
    """Return the seconds that a checkpoint may take after SIGTERM on this kind of cluster."""
    if config.cluster.kind != "slurm":
        return GRACE_S
    given = config.cluster.slurm.grace_s
    return max(given - TAKE_DOWN_S, given / 2)


class Stopping:
    """A stop request of one run, shared by those that make it and those that honour it.

    While `heeded` is set, a training loop will finish the running step before it stops.
    """

    def __init__(self) -> None:
        self.heeded = False
        self.stopped = False
        """Whether the run ends because of a stop request."""
        self._over = False
        self._asked = asyncio.Event()
        self._work: asyncio.Future[Any] | None = None
        self._left: list[asyncio.Future[Any]] = []

    @property
    def requested(self) -> bool:
        return self._asked.is_set()

    def cancels(self, work: asyncio.Future[Any]) -> None:
        """Set the task to cancel when no training loop honours the request."""
        self._work = work

    def ask(self, now: bool = False) -> bool:
        """Request a stop; return whether a checkpoint is written first. Repeats have no effect."""
        if self._over:
            return False
        if self.heeded and not now:
            self._asked.set()
            return True
        self.left()
        if self._work is not None:
            self._work.cancel()
        return False

    def left(self) -> None:
        """Mark the run as stopped on request, after its work was finished or abandoned."""
        self.stopped = True
        self.take_down()

    def take_down(self) -> None:
        """Mark the work as over: later stop requests have no effect."""
        self._over = True

    async def until_requested(self) -> None:
        """Wait until a stop is requested."""
        await self._asked.wait()

    def check(self) -> None:
        """Raise `StopAsked` if a stop was requested."""
        if self.requested:
            raise StopAsked

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may be abandoned; raises `StopAsked` when a stop is requested first.

        Abandoned work keeps running until `close`: rollouts that are sampled together must not lose
        one of them, or the others would differ in their last digits from a run without the stop.
        """
        task, requested = asyncio.ensure_future(work), asyncio.ensure_future(self.until_requested())
        try:
            await asyncio.wait([task, requested], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopAsked
            return task.result()
        finally:
            requested.cancel()
            if not task.done():
                self._left.append(task)

    async def close(self) -> None:
        """Cancel the abandoned work."""
        await cancel_and_wait(self._left)


async def until_interrupted(
    work: Coroutine[Any, Any, int],
    signals: CommandSignals,
    stopping: Stopping | None = None,
    patience_s: float | None = GRACE_S,
    patient: Collection[int] = (signal.SIGTERM,),
) -> int:
    """Run `work` to its end or a signal, then shut down in order; return the exit status.

    If the first signal is in `patient`, running work gets `patience_s` to finish. Signals that
    arrived earlier are delivered once the work has started, so that it reports its end.
    """
    wish = stopping or Stopping()
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    wish.cancels(task)
    first: list[int] = []

    def interrupt(number: int) -> None:
        waits = wish.ask(now=number not in patient or bool(first))
        first.append(number)
        if waits and patience_s is not None:
            loop.call_later(patience_s, wish.ask, True)

    with signals.heard_by(interrupt):
        try:
            return await task
        except asyncio.CancelledError:
            if not wish.stopped:
                raise
            return signals.status or STOPPED
