"""SIGINT and SIGTERM of one command, from its first line until its process is gone.

    before `hold`       nothing is started yet: the first signal raises `Interrupted`
    after `hold`        no signal raises; each waits for `check` or `heard_by`
    in `heard_by`       each is given to a listener, on the event loop
    after `heard_by`    none disturbs: what the first one promised is being written

So only the first signal can raise, and only where nothing has been promised. A run that hangs is
killed by a third one that comes long after the second, as by SIGKILL.
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
"""SIGTERM within this time of another signal is the same wish: a batch system may tell several
processes, which hand it on."""
KILL_AFTER_S = 30.0
"""A third signal that comes so long after the second kills the process: taking down hangs."""


class Interrupted(KeyboardInterrupt):
    """A signal came before anything was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = SIGNALLED + number


def kill_this_process() -> None:
    """End as by SIGKILL: the run's other processes notice and end themselves."""
    os.kill(os.getpid(), signal.SIGKILL)


class CommandSignals:
    """The signals of one command; called by Python with each of them, once `caught`."""

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
        """The exit status that the first signal stands for; 0 where none has come."""
        return SIGNALLED + self._received[0] if self._received else 0

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        """Take note of a signal. Raises `Interrupted` where nothing is started yet."""
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
        """Catch them during the block; with `for_good` they are ignored from its end on.

        Python's own end would be disturbed by them. Call it on the main thread.
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
        """Let no signal raise from now on. Raises `Interrupted` where one has come."""
        self._held = True
        self.check()

    def check(self) -> None:
        """Raise `Interrupted` where a signal has come, perhaps within what swallows exceptions."""
        if self._received:
            raise Interrupted(self._received[0])

    @contextmanager
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Give each signal to the listener on the running loop, also those that were held.

        What was scheduled before this call runs before the listener does.
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
        """Wake the loop when a signal comes in the moment in which it falls asleep."""
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
