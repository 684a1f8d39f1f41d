"""Helpers that wait for several tasks and never leave one running.

Background tasks that are not awaited, with one owner that is notified of failures.

A task that returns or is cancelled has ended as planned; an exception is reported to its owner at
once, so that no task fails silently. Independent of actors and Monarch.

An event loop in a thread of its own, and calls across two loops, many at each wake-up.

A call across threads costs most where it wakes the other loop, so calls and results that come
before the other loop has woken up go with the one that wakes it (benchmarks/mcp_calls.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LoopThread:
    """A daemon thread with an event loop, which other loops call."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._calls = _Inbox(self.loop)
        self._answers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there. Waits for it; cancelled, it is cancelled there too."""
        own = asyncio.get_running_loop()
        answer: asyncio.Future[T] = own.create_future()
        inbox = self._answers.get(own)
        if inbox is None:
            inbox = self._answers[own] = _Inbox(own)
        call = _Call(work, answer, inbox)
        self._calls.put(call.start)
        try:
            return await answer
        except asyncio.CancelledError:
            self._calls.put(call.cancel)
            raise

    def run_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there; block this thread until it has ended."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a coroutine there; does not wait."""
        asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Stop the loop; block this thread until the other one has ended."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class _Inbox:
    """Functions that a loop is to run; any thread may put them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._functions: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, function: Callable[[], None]) -> None:
        """Have a function run there. Raises RuntimeError if the loop is closed."""
        self._functions.append(function)
        if not self._is_woken:  # checked after the append: who clears it sees the function
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_woken = False
        for _ in range(len(self._functions)):
            self._functions.popleft()()


class _Call:
    """A coroutine on one loop, for a future of another one."""

    def __init__(
        self, work: Coroutine[Any, Any, T], answer: asyncio.Future[T], inbox: _Inbox
    ) -> None:
        self._work, self._answer, self._inbox = work, answer, inbox
        self._task: asyncio.Task[Any]

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        self._task.cancel()

    def _ended(self, _: asyncio.Task[Any]) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed, so nobody waits
            self._inbox.put(self._give)

    def _give(self) -> None:
        task, answer = self._task, self._answer
        if answer.done():
            return
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())


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


async def unless(
    work: Coroutine[Any, Any, T],
    ends: Iterable[asyncio.Future[Any]],
    error: Callable[[], BaseException | None],
) -> T:
    """Run `work`; if one of `ends` is done before it, cancel it and raise `error()`.

    Waits until the work has ended, also if the wait is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and (found := error()) is not None:
            raise found
        return await task
    finally:
        await cancel_and_wait([task])


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start work in a thread that never keeps a process alive; return its future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the work cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is read
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


def reported_to_loop(name: str, error: BaseException) -> None:
    """Report an error to the loop's exception handler, which logs it, if there is no recorder."""
    about = {"message": f"{name} failed", "exception": error}
    asyncio.get_running_loop().call_exception_handler(about)
