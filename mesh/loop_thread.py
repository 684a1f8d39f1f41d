"""An event loop in a thread of its own, and calls across two loops, many at each wake-up.

A call across threads costs most where it wakes the other loop, so calls and results that come
before the other loop has woken up go with the one that wakes it (benchmarks/mcp_calls.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
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
        if not self._is_woken:  # asked after the append: who clears it sees the function
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
