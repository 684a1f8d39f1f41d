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
from typing import Any

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
        an error of tasks. A plain function that is late goes on in its thread.
        """
        try:
            if self.limit_s is None:  # no event loop is needed where nothing waits
                return await self._result(function, *args)
            async with asyncio.timeout(self.limit_s) as limit:
                with _clock(limit):
                    return await self._result(function, *args)
        except TaskError:
            raise
        except (Exception, SystemExit) as error:
            if self.limit_s is not None and limit.expired():
                raise TaskTimeout(what, self.limit_s) from None
            raise code_error(what, error) from error

    async def _result(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self.run_plain(lambda: function(*args))
