"""Calls of a task's functions: plain ones and coroutines, each within a time limit.

Errors of a task's own code name its line.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from composer_mesh.tasks.errors import TaskError, TaskTimeout, code_error

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
