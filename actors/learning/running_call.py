"""Notices that a user's function, called in a thread, does not return in time.

A thread cannot be ended. So whoever waits for it raises an error, and the process is then ended by
its owner, as after any error of a user's function.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from composer_mesh.losses.custom_function import CustomFunctionError, Function
from composer_mesh.mesh.progress import made_progress

T = TypeVar("T")


class RunningCall:
    """The call of a user's function that is under way; each may take `limit_s`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._called: tuple[str, float] | None = None

    def watched(self, function: Function, name: str) -> Function:
        """Return the function, which records here when it is called and returns."""

        @functools.wraps(function)
        def call(*inputs: Any, **kwargs: Any) -> Any:
            self._called = (name, self._clock())
            try:
                return function(*inputs, **kwargs)
            finally:
                self._called = None
                made_progress(f"a call of {name}")

        return call

    def left_s(self) -> float:
        """Return the seconds until a call could be late: of the one under way, or of a next one."""
        called = self._called
        return self._limit_s - (0.0 if called is None else self._clock() - called[1])

    def check(self) -> None:
        """Raise `CustomFunctionError` if the call under way has exceeded its time."""
        called = self._called
        if called is not None and self._clock() - called[1] >= self._limit_s:
            raise CustomFunctionError(
                called[0],
                "",
                f"it did not return within {self._limit_s:g} s: look for a loop without end in it, "
                "or raise supervision.custom_function_s",
            )

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that calls the function in a thread. Raises once a call is late."""
        working = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait([working], timeout=max(self.left_s(), 0.0))
                if done:
                    return working.result()
                self.check()
        finally:
            working.cancel()
