"""Helpers that wait for several tasks and never leave one running.

Background tasks that are not awaited, with one owner that is notified of failures.

A task that returns or is cancelled has ended as planned; an exception is reported to its owner at
once, so that no task fails silently. Independent of actors and Monarch.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently; return their results in order.

    Waits until all have ended, also when one fails or the wait is cancelled: then the others are
    cancelled, once, and may clean up undisturbed.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    done: set[asyncio.Future[Any]] = set()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_and_wait(tasks)
    for task in done:
        task.result()
    return [task.result() for task in tasks]


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start work in a thread that never keeps a process alive; return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work in a thread, so that the event loop continues. Waits for its end.

    A thread cannot be stopped, so a cancelled caller also waits for the end, however often it is
    cancelled: a lock around the call is held as long as the work needs it.
    """
    # A future of the executor, since the task of `asyncio.to_thread` could be cancelled by itself.
    within = partial(contextvars.copy_context().run, work, *args)
    working = asyncio.get_running_loop().run_in_executor(None, within)
    try:
        return await asyncio.shield(working)
    finally:
        await _ended([working])


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, once, and wait until each of them has ended.

    A cancellation of this wait does not interrupt their cleanup; it is raised afterwards.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    disturbed = await _ended(tasks)
    if disturbed is not None:
        raise disturbed


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> asyncio.CancelledError | None:
    """Wait until each task has ended, also if cancelled; return the last cancellation."""
    disturbed: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            disturbed = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved
    return disturbed


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
