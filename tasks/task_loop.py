"""Runs a task's code on an event loop and threads of its own, away from those of an actor."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
MOST_THREADS = 128
"""Plain functions of a task that run at once; further ones wait."""


class TaskLoopBlocked(RuntimeError):
    """A task's coroutine does not let others run: it waits or computes without `await`."""


class TaskLoop:
    """A thread with an event loop. It is a daemon: code that never returns holds up no exit."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "task"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="task", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine there. Waits for it; cancelled, it is cancelled there too.

        Raises TaskLoopBlocked where the loop does nothing for `limit_s` seconds.
        """
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            while not (await asyncio.wait([running], timeout=limit_s))[0]:
                await self._answers(limit_s)
        except asyncio.CancelledError:
            running.cancel()
            raise
        return running.result()

    async def _answers(self, limit_s: float) -> None:
        """Wait for the loop to answer; raise TaskLoopBlocked if it does not."""
        answered = asyncio.Event()
        own = asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(own.call_soon_threadsafe, answered.set)
        try:
            async with asyncio.timeout(limit_s):
                await answered.wait()
        except TimeoutError:
            raise TaskLoopBlocked(
                f"code of the task has blocked its event loop for {limit_s:g} s, at\n"
                f"{self._stack()}make the function plain (def), which runs in a thread, or await"
            ) from None

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
