"""Calls of a task's functions: plain ones and coroutines, each within a time limit.

Errors of a task's own code name its line.

Which call each thread of a process is running, in memory that its parent process reads.

A process whose interpreter is held by a task's code can say nothing. What it wrote here before
stays readable, also after its end.
"""

from __future__ import annotations

import asyncio
import inspect
import mmap
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from struct import Struct
from typing import Any

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.tasks.errors import TaskError, TaskTimeout, code_error

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


_limit: ContextVar[CallLimit | None] = ContextVar("limit", default=None)


class CallLimit:
    """The time limit of one call, which stands still while the call waits for something else."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit, self._waiting, self._left_s = limit, 0, 0.0
        self.over = False

    def pause(self) -> None:
        """Stop the clock; several waits of one call may overlap."""
        self._waiting += 1
        ends_at = self._limit.when()
        if ends_at is not None and not self._limit.expired() and not self.over:
            self._left_s = ends_at - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def resume(self) -> None:
        """Let the clock run on, once the last wait has ended."""
        self._waiting -= 1
        if not self._waiting and self._limit.when() is None and not self.over:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)


@contextmanager
def _clock(limit: asyncio.Timeout) -> Iterator[None]:
    """Let waits of the block, and of tasks that it starts, stop the clock of a limit."""
    clock = CallLimit(limit)
    before = _limit.set(clock)
    try:
        yield
    finally:
        clock.over = True
        _limit.reset(before)


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Mark a wait for another service: it does not count towards the limit of the call."""
    limit = _limit.get()
    if limit is not None:
        limit.pause()
    mark = object()
    _waits.add(mark)
    try:
        yield
    finally:
        _waits.discard(mark)
        if limit is not None:
            limit.resume()


_waits: set[object] = set()


def waits_for_others() -> bool:
    """Whether a call in this process waits for another service, which takes as long as it takes.

    Every other call ends within its limit.
    """
    return bool(_waits)


RunPlain = Callable[[Callable[[], Any]], Awaitable[Any]]


def is_requested(error: BaseException) -> bool:
    """Whether an error ends the running asyncio task because somebody else wants it to end.

    False for a CancelledError or GeneratorExit that code within the task has raised by itself: its
    caller still waits for an answer.
    """
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs: the coroutine is being closed
        return True
    return task is None or task.cancelling() > 0


async def at_once(function: Callable[[], Any]) -> Any:
    """Run a plain function in the calling thread."""
    return function()


@dataclass(frozen=True)
class TaskCalls:
    """How a task's functions are called: `run_plain` runs plain ones; each may take `limit_s`."""

    run_plain: RunPlain = at_once
    limit_s: float | None = None

    async def __call__(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function and return its result; `what` names it in errors.

        Raises TaskTimeout after the limit, and TaskCodeError where the function raised anything but
        an error of tasks, also a CancelledError of its own, StopIteration or SystemExit. A plain
        function that is late keeps running in its thread.
        """
        try:
            if self.limit_s is None:  # no event loop is needed where nothing waits
                return await self._result(function, *args)
            async with asyncio.timeout(self.limit_s) as limit:
                with _clock(limit):
                    return await self._result(function, *args)
        except TaskError:
            raise
        except BaseException as error:
            if is_requested(error) or is_interrupt(error):
                raise
            if self.limit_s is not None and limit.expired():
                raise TaskTimeout(what, self.limit_s) from None
            cause = error.error if isinstance(error, _Raised) else error
            raise code_error(what, cause) from cause

    async def _result(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        found = await self.run_plain(partial(_contained, function, args))
        if not isinstance(found, _Raised):
            return found
        if isinstance(found.error, TaskError):
            raise found.error
        raise found


class _Raised(Exception):
    """What a plain function raised; a future or a coroutine cannot carry a StopIteration."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _contained(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function; return what it raises, which then passes through threads unchanged."""
    try:
        return function(*args)
    except BaseException as error:
        if is_interrupt(error):
            raise
        return _Raised(error)
