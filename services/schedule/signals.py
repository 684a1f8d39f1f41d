"""SIGINT and SIGTERM handling of one command, from its start until its process has ended.

    before `hold`       nothing is started yet: the first signal raises `Interrupted`
    after `hold`        no signal raises; signals are queued for `check` or `heard_by`
    in `heard_by`       each is passed to a listener, on the event loop
    after `heard_by`    ignored: the shutdown that the first one started is being completed

So only the first signal can raise, and only before anything is started. A hung run is killed, as by
SIGKILL, by a third signal that arrives long after the second.
"""

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
        self._unheard: deque[int] = deque()
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
        self._unheard.append(number)
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
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Pass each signal to the listener on the running loop, including queued ones.

        Callbacks scheduled before this call run before the listener does.
        """
        loop = asyncio.get_running_loop()

        def tell() -> None:
            while self._unheard and self._wake is not None:
                listener(self._unheard.popleft())

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
