"""Which call each thread of a process is running, in memory that its parent process reads.

A process whose interpreter is held by a task's code can say nothing. What it wrote here before
stays readable, also after its end.
"""

from __future__ import annotations

import asyncio
import mmap
import signal
import threading
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from struct import Struct
from typing import Any

NO_CALL = -1
current_call: ContextVar[int] = ContextVar("current_call", default=NO_CALL)
"""Within an endpoint that was called by a message: the number of the call."""

MARK = Struct("=qqq")
"""Identity of a thread in Python, its id in the system, and one more than the call's number."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal at which a process with marks writes the stacks of its threads, its interpreter held or
not."""
MOST_MARKS = 1024
MARKS_BYTES = MOST_MARKS * MARK.size


@dataclass(frozen=True)
class CallMark:
    """A thread that is running code of a call."""

    thread: int
    native_thread: int
    call: int


class CallMarks:
    """The marks of this process; `file` is a descriptor of `MARKS_BYTES` bytes."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, MARKS_BYTES)
        self._places, self._own = count(), threading.local()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark this thread as one that runs the current call, while the block runs."""
        number = current_call.get()
        self._write(number)
        try:
            yield
        finally:
            self._write(NO_CALL)

    def task_of(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        /,
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Make a task whose steps are marked: a task factory for an event loop."""
        task = asyncio.Task(self._marked(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled first never began
        return task

    async def _marked(self, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any]) -> Any:
        return await _Steps(work, self)

    def _write(self, number: int) -> None:
        place = getattr(self._own, "place", None)
        if place is None:
            place = self._own.place = next(self._places)
        if place < MOST_MARKS:
            ids = threading.get_ident(), threading.get_native_id()
            MARK.pack_into(self._memory, place * MARK.size, *ids, number + 1)


class _Steps(Awaitable[Any]):
    """A coroutine whose steps are marked, one by one, since others run between them."""

    def __init__(
        self, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], marks: CallMarks
    ) -> None:
        self._work, self._marks = work, marks

    def __await__(self) -> Generator[Any, Any, Any]:
        step, given = self._work.send, None
        while True:
            with self._marks.running():
                try:
                    waits_for = step(given)
                except StopIteration as end:
                    return end.value
            try:
                step, given = self._work.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001  the coroutine handles it
                before = error.__traceback__ and error.__traceback__.tb_next
                step, given = self._work.throw, error.with_traceback(before)


def read_marks(file: int) -> list[CallMark]:
    """Return the threads of the other process that run a call."""
    with mmap.mmap(file, MARKS_BYTES) as memory:
        rows = MARK.iter_unpack(memory[:])
        return [CallMark(thread, native, one - 1) for thread, native, one in rows if one]
