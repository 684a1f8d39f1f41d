"""Stopping a run early: immediately, or after writing a checkpoint.

    stop       waits for rollouts or an evaluation are abandoned
               a step that is being trained is finished
               its checkpoint is written, then the run is shut down in order
    stop now   everything is abandoned

A run that has not started to train, or a partial run, has nothing to finish and ends at once. What
a signal requests is done within a bounded time; SIGINT, or a second signal, ends the run at once.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit status of a run stopped by SIGTERM or by a command."""
GRACE_S = 60.0
"""Longest time from SIGTERM until the run stops waiting for a checkpoint."""
ECHO_S = 2.0
"""A repeated SIGTERM within this time is ignored: a batch system may signal several processes,
which forward it."""
TAKE_DOWN_S = 30.0
"""Part of Slurm's grace period that is reserved for shutting the run down."""


class StopAsked(Exception):
    """Raised where work is abandoned because the run was asked to stop."""


def grace_s(config: Config) -> float:
    """Return the seconds that a checkpoint may take after SIGTERM on this kind of cluster."""
    if config.cluster.kind != "slurm":
        return GRACE_S
    given = config.cluster.slurm.grace_s
    return max(given - TAKE_DOWN_S, given / 2)


class Stopping:
    """A request to stop one run, shared by those that make it and those that honour it.

    While `heeded` is set, a training loop will finish what is under way before it stops.
    """

    def __init__(self) -> None:
        self.heeded, self.ended = False, False
        self._asked = asyncio.Event()
        self._work: asyncio.Future[Any] | None = None
        self._left: list[asyncio.Future[Any]] = []

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def over(self, work: asyncio.Future[Any]) -> None:
        """Set the task that is cancelled where no training loop honours the request."""
        self._work = work

    def ask(self, now: bool = False) -> bool:
        """Request a stop; return whether a checkpoint will be written first."""
        if self.heeded and not now and not self.ended:
            self._asked.set()
            return True
        if not self.ended and self._work is not None:
            self._work.cancel()
        self.ended = True
        return False

    def left(self) -> None:
        """Mark the work as finished: later requests change nothing."""
        self.ended = True

    def check(self) -> None:
        """Raise `StopAsked` if a stop was requested."""
        if self.asked:
            raise StopAsked

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may be abandoned; raises `StopAsked` when a stop is requested first.

        Abandoned work keeps running until `close`: rollouts that are sampled together must not lose
        one of them, or the others would differ in their last digits from a run without the stop.
        """
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopAsked
            return task.result()
        finally:
            asked.cancel()
            if not task.done():
                self._left.append(task)

    async def close(self) -> None:
        """Cancel the abandoned work."""
        await cancel_and_wait(self._left)


async def until_interrupted(
    work: Coroutine[Any, Any, int], stopping: Stopping | None = None, patience_s: float = GRACE_S
) -> int:
    """Run to the end, or until SIGINT or SIGTERM, then shut down in order; return the exit status.

    Shutting down takes a bounded time, so further signals do not interrupt it.
    """
    wish, received, echo_until = stopping or Stopping(), list[int](), 0.0
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    wish.over(task)

    def interrupt(number: int) -> None:
        nonlocal echo_until
        if number == signal.SIGTERM and loop.time() < echo_until:
            return
        echo_until = loop.time() + ECHO_S
        received.append(number)
        patient = number == signal.SIGTERM and len(received) == 1
        if wish.ask(now=not patient):
            loop.call_later(patience_s, wish.ask, True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not wish.ended:
            raise
        return 128 + received[0] if received else STOPPED
