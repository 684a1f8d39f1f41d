"""Calls of a task's functions: plain ones and coroutines, each within a time limit.

Errors of a task's own code name its line.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.tasks.errors import TaskError, TaskTimeout, code_error

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
    if limit is None:
        yield
        return
    limit.pause()
    try:
        yield
    finally:
        limit.resume()


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


async def in_a_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread, so that one that waits holds up nothing else."""
    return await asyncio.to_thread(function)


@dataclass(frozen=True)
class Calls:
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
