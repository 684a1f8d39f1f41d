"""Background tasks that are not awaited, with one owner that is notified of failures.

A task that returns or is cancelled has ended as planned; an exception is reported to its owner at
once, so that no task fails silently. Independent of actors and Monarch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")
Failed = Callable[[str, BaseException], None]
"""Failure callback: the task's name and its exception."""


class BackgroundTasks:
    """The background tasks of one owner; `failed` is called for each that raises."""

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, name: str, work: Coroutine[Any, Any, T], failed: Failed | None = None
    ) -> asyncio.Task[T]:
        """Start `work` as a task; `failed`, if given, replaces the owner's callback."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, failed or self._failed))
        return task

    async def wait(self) -> None:
        """Wait until each task has ended; none is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel every task. Waits until each has ended."""
        await cancel_and_wait(self._tasks)

    def _ended(self, failed: Failed, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(task.get_name(), error)


def told_to_loop(name: str, error: BaseException) -> None:
    """Report an error to the loop's exception handler, which logs it, if there is no recorder."""
    about = {"message": f"{name} failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(about)
