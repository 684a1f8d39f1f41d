"""Stopping a run early: immediately, or after writing a checkpoint.

    stop       waits for rollouts or an evaluation are abandoned
               a step that is being trained is finished
               its checkpoint is written, then the run is shut down in order
    stop now   everything is abandoned

A run that has not started to train, or a partial run, has nothing to finish and ends at once. A
signal's request is carried out within a bounded time; SIGINT, or a second signal, ends the run at
once. The shutdown itself is never interrupted.

Signals of a command, from its start until its process has ended:

    before `hold`         nothing is started yet: the first signal raises `Interrupted`
    after `hold`          no signal raises; signals are queued for `check` or `delivered_to`
    in `delivered_to`     each is passed to a listener, on the event loop
    after `delivered_to`  ignored: the shutdown that the first one started is being completed

So only the first signal can raise, and only before anything is started. A hung run is killed, as by
SIGKILL, by a third signal that arrives long after the second.
"""

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128
ECHO_S = 2.0
"""Seconds after another signal in which SIGTERM is a duplicate.

Batch systems may signal several processes, which forward it.
"""
KILL_AFTER_S = 30.0
"""A third signal this long after the second kills the process, since its shutdown hangs."""


class Interrupted(KeyboardInterrupt):
    """A signal arrived before anything was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = SIGNALLED + number


def kill_this_process() -> None:
    """Kill this process by SIGKILL: the run's other processes detect it and end."""
    os.kill(os.getpid(), signal.SIGKILL)


class CommandSignals:
    """Signal handler of one command, installed by `caught`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[], None] = kill_this_process,
    ) -> None:
        self._clock, self._kill = clock, kill
        self._received: list[int] = []
        self._times: list[float] = []
        self._pending: deque[int] = deque()
        self._wake: Callable[[], object] | None = None
        self._held = self._caught = False

    @property
    def status(self) -> int:
        """Exit status for the first signal; 0 if none has arrived."""
        return SIGNALLED + self._received[0] if self._received else 0

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal. Raises `Interrupted` if nothing is started yet."""
        now = self._clock()
        if number == signal.SIGTERM and self._times and now - self._times[-1] < ECHO_S:
            return
        self._received.append(number)
        self._times.append(now)
        self._pending.append(number)
        if len(self._times) > 2 and now - self._times[1] > KILL_AFTER_S:
            self._kill()
        if self._wake is not None:
            self._wake()
        elif not self._held and len(self._received) == 1:
            raise Interrupted(number)

    @contextmanager
    def caught(self, for_good: bool = False) -> Iterator[None]:
        """Handle signals during the block; with `for_good` they are ignored afterwards.

        Otherwise they could disturb the interpreter's shutdown. Must be called on the main thread.
        """
        before = {number: signal.signal(number, self) for number in NUMBERS}
        self._caught = True
        try:
            yield
        finally:
            self._caught = False
            for number in NUMBERS:
                signal.signal(number, signal.SIG_IGN if for_good else before[number])

    def hold(self) -> None:
        """Queue signals from now on instead of raising. Raises `Interrupted` if one has arrived."""
        self._held = True
        self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived, even if its exception was swallowed."""
        if self._received:
            raise Interrupted(self._received[0])

    @contextmanager
    def delivered_to(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Pass each signal to the listener on the running loop, including queued ones.

        Callbacks scheduled before this call run before the listener does.
        """
        loop = asyncio.get_running_loop()

        def tell() -> None:
            while self._pending and self._wake is not None:
                listener(self._pending.popleft())

        with self._wakes(loop):
            self._held, self._wake = True, lambda: loop.call_soon_threadsafe(tell)
            self._wake()
            try:
                yield
            finally:
                self._wake = None

    @contextmanager
    def _wakes(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Wake the loop also for a signal that arrives just before it blocks in select."""
        if not self._caught:
            yield
            return
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.setblocking(False)
            sender.setblocking(False)
            before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            loop.add_reader(receiver, receiver.recv, 4096)
            try:
                yield
            finally:
                loop.remove_reader(receiver)
                signal.set_wakeup_fd(before)


T = TypeVar("T")

STOPPED = 128 + signal.SIGTERM
"""Exit status of a run stopped by SIGTERM or by a command."""
GRACE_S = 60.0
"""Longest time after SIGTERM that a checkpoint is waited for."""
SHUTDOWN_S = 30.0
"""Part of Slurm's grace period that is reserved for shutting the run down."""


class StopRequested(Exception):
    """Raised when work is abandoned because of a stop request."""


def grace_s(config: Config) -> float:
    """Return the seconds that a checkpoint may take after SIGTERM on this kind of cluster."""
    if config.cluster.kind != "slurm":
        return GRACE_S
    given = config.cluster.slurm.grace_s
    return max(given - SHUTDOWN_S, given / 2)


class Stopping:
    """A stop request of one run, shared by those that make it and those that honour it.

    While `finishes_step` is set, a training loop will finish the running step before it stops.
    """

    def __init__(self) -> None:
        self.finishes_step = False
        self.stopped = False
        """Whether the run ends because of a stop request."""
        self._over = False
        self._requested = asyncio.Event()
        self._work: asyncio.Future[Any] | None = None
        self._left: list[asyncio.Future[Any]] = []

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def cancels(self, work: asyncio.Future[Any]) -> None:
        """Set the task to cancel when no training loop honours the request."""
        self._work = work

    def ask(self, now: bool = False) -> bool:
        """Request a stop; return whether a checkpoint is written first. Repeats have no effect."""
        if self._over:
            return False
        if self.finishes_step and not now:
            self._requested.set()
            return True
        self.left()
        if self._work is not None:
            self._work.cancel()
        return False

    def left(self) -> None:
        """Mark the run as stopped on request, after its work was finished or abandoned."""
        self.stopped = True
        self.mark_over()

    def mark_over(self) -> None:
        """Mark the work as over: later stop requests have no effect."""
        self._over = True

    async def until_requested(self) -> None:
        """Wait until a stop is requested."""
        await self._requested.wait()

    def check(self) -> None:
        """Raise `StopRequested` if a stop was requested."""
        if self.requested:
            raise StopRequested

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that may be abandoned. Raises `StopRequested` once a stop is requested.

        Abandoned work keeps running until `close`: rollouts that are sampled together must not lose
        one of them, or the others would differ in their last digits from a run without the stop.
        """
        task, requested = asyncio.ensure_future(work), asyncio.ensure_future(self.until_requested())
        try:
            await asyncio.wait([task, requested], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopRequested
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

    with signals.delivered_to(interrupt):
        try:
            return await task
        except asyncio.CancelledError:
            if not wish.stopped:
                raise
            return signals.status or STOPPED
