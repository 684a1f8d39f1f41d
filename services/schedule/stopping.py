"""How a run is ended before its time: at once, or when a checkpoint is on the disk.

    asked      what only waits, for rollouts or an evaluation, is left
               a step that is being trained is finished
               its checkpoint is written, then the run is taken down in order
    asked now  everything is left where it is

A run that has not begun to train, or half a run, has nothing to finish and ends at once. What a
signal asks for is done within a bounded time; SIGINT, or a second signal, ends the run at once.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit status of a run that was asked to stop, by SIGTERM or by a command."""
GRACE_S = 60.0
"""Longest time from SIGTERM to the moment at which no checkpoint is waited for any more."""
ECHO_S = 2.0
"""SIGTERM again within this time is the same wish: a batch system may tell several processes, which
hand it on."""
TAKE_DOWN_S = 30.0
"""Of the time that Slurm gives, what taking the run down may need."""


class StopAsked(Exception):
    """Somebody wants the run to stop, and what was waited for need not be there."""


def grace_s(config: Config) -> float:
    """Seconds that a checkpoint may take after SIGTERM, where the run is."""
    if config.cluster.kind != "slurm":
        return GRACE_S
    given = config.cluster.slurm.grace_s
    return max(given - TAKE_DOWN_S, given / 2)


class Stopping:
    """The wish that one run should stop, from whoever has it to whoever heeds it.

    While it is `heeded` there is somebody who finishes what is under way.
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
        """Know what to cancel where nobody heeds the wish."""
        self._work = work

    def ask(self, now: bool = False) -> bool:
        """Let the run stop; whether a checkpoint is written before."""
        if self.heeded and not now and not self.ended:
            self._asked.set()
            return True
        if not self.ended and self._work is not None:
            self._work.cancel()
        self.ended = True
        return False

    def left(self) -> None:
        """What was under way is finished; who asks from now on changes nothing."""
        self.ended = True

    def check(self) -> None:
        """Raise `StopAsked` where somebody has asked."""
        if self.asked:
            raise StopAsked

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something that may be left undone; raises `StopAsked` when it is.

        It goes on until `close`: rollouts that are sampled together must not lose one of them, or
        the others would have other last digits than without the stop.
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
        """End what was left undone."""
        await cancel_and_wait(self._left)


async def until_interrupted(
    work: Coroutine[Any, Any, int], stopping: Stopping | None = None, patience_s: float = GRACE_S
) -> int:
    """Run to the end, or until SIGINT or SIGTERM; then let everything be taken down in order.

    Taking down needs a bounded time, so further signals do not disturb it.
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
