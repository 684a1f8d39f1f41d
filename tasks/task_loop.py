"""Runs a task's code on an event loop and threads of its own, away from those of an actor.

A coroutine that blocks the loop cannot be ended. Its call fails, the others on that loop are lost
through no fault of theirs, and the next ones get a new loop.

Runs episodes of a task: each call on the task's own loop and threads, within a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.calls import CallMarks, RunPlain, TaskCalls, is_requested
from composer_mesh.tasks.errors import TaskError, code_error
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task

T = TypeVar("T")
MOST_THREADS = 128
"""Plain functions of a task that run at once; further ones wait."""

MOST_ABANDONED = MOST_THREADS // 2
"""Plain functions that run although nobody waits for them any more, after which a process has to
end."""

ANSWERS_S = 5.0
"""Least time that a loop is given to run something else; a busy machine takes some of it."""

MOST_BLOCKED = 8
"""Blocked loops of a process, each of which keeps its thread, after which it has to end."""


class LoopBlocked(TaskError):
    """A call of a task's code did not let others run: it waited or computed without `await`."""


class LoopLost(Exception):
    """A call was on a loop that another call has blocked."""


class TooManyBlocked(RuntimeError):
    """So many loops or threads are blocked that the process has to be replaced."""


class TaskLoop:
    """A thread with an event loop, which is replaced when a task's code blocks it.

    The loop's thread is a daemon. A plain function that never returns keeps one of its threads, and
    an interpreter that ends by itself waits for those: actors are ended by their owner.
    """

    def __init__(self, answers_s: float = ANSWERS_S, marks: CallMarks | None = None) -> None:
        """A loop that runs nothing else for `answers_s` seconds, or a call's limit, is blocked.

        `marks` record which call each thread runs.
        """
        self._answers_s, self._marks = answers_s, marks
        self._threads = ThreadPoolExecutor(MOST_THREADS, "task")
        self._abandoned: set[Future[Any]] = set()
        self._current = _LoopThread(self._threads, self._marks)
        self._blocked = 0

    @property
    def abandoned(self) -> int:
        """Plain functions that still run although their calls have ended."""
        return len(self._abandoned)

    async def in_a_thread(self, function: Callable[[], Any]) -> Any:
        """Run a plain function in a thread; call it on the task's loop.

        Cancelled, a function that has begun continues, and is counted until it returns.
        """
        context, marked = contextvars.copy_context(), function
        if self._marks is not None:
            marked = partial(_marked, self._marks, function)
        running = self._threads.submit(context.run, marked)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.cancel():
                self._abandoned.add(running)
                running.add_done_callback(self._abandoned.discard)
            raise

    async def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine there. Waits for it; cancelled, it is cancelled there too.

        After `limit_s` seconds it is checked whether the loop runs other things. Raises LoopBlocked
        where this call prevents that, LoopLost where another one does, and TooManyBlocked where
        that has happened too often, or a call fails when too many functions never returned.
        """
        thread = self._current
        running = thread.start(work)
        lost = thread.lost()
        try:
            while not await _any_done(running, lost, limit_s):
                if not await thread.answers(max(limit_s, self._answers_s)):
                    self._replace(thread)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if running.done():
            lost.cancel()
            if running.cancelled():
                raise TaskError("the task's code cancelled the call that it runs in: let it return")
            if running.exception() is not None and self.abandoned >= MOST_ABANDONED:
                raise TooManyBlocked(
                    f"{self.abandoned} plain functions of the task did not return within "
                    "their limit and hold their threads: add a timeout to what they wait for"
                ) from running.exception()
            return running.result()
        raise self._ended(thread, work)

    def _replace(self, thread: _LoopThread) -> None:
        if thread is self._current:
            self._current = _LoopThread(self._threads, self._marks)
            self._blocked += 1
        thread.lose()

    def _ended(self, thread: _LoopThread, work: Coroutine[Any, Any, Any]) -> Exception:
        """Return what ended a call on a lost loop."""
        if self._blocked >= MOST_BLOCKED:
            return TooManyBlocked(thread.reason)
        is_blocker = thread.blocker is None or thread.blocker is work
        return LoopBlocked(thread.reason) if is_blocker else LoopLost(thread.reason)


class _LoopThread:
    """One event loop in a thread, and the calls that are on it."""

    def __init__(self, threads: ThreadPoolExecutor, marks: CallMarks | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(threads)
        if marks is not None:
            self._loop.set_task_factory(marks.task_of)
        self._calls: dict[asyncio.Task[Any], Coroutine[Any, Any, Any]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._is_lost = False
        self.blocker: Coroutine[Any, Any, Any] | None = None
        """The call that blocks the loop, if it is known."""
        self.reason = ""
        self._thread = threading.Thread(target=self._run, name="task", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start a coroutine; return its future on the caller's loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._called(work), self._loop))

    def lost(self) -> asyncio.Future[None]:
        """Return a future that is done once the loop is lost."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_lost:
            future.set_result(None)
        self._waiting = [one for one in self._waiting if not one.done()] + [future]
        return future

    async def answers(self, limit_s: float) -> bool:
        """Return whether the loop runs other things. Waits for its answer, `limit_s` at most."""
        answered = asyncio.Event()
        own = asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(own.call_soon_threadsafe, answered.set)
        try:
            async with asyncio.timeout(limit_s):
                await answered.wait()
        except TimeoutError:
            self.blocker = self._blocker()
            self.reason = (
                f"code of the task has blocked its event loop for {limit_s:g} s, at\n"
                f"{self._stack()}make the function plain (def), which runs in a thread, or await"
            )
            return False
        return True

    def lose(self) -> None:
        """Tell every call on the loop that it is lost."""
        self._is_lost = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _run(self) -> None:
        """Run the loop: SystemExit and KeyboardInterrupt of a task leave it, and are its task's."""
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    async def _called(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = work
        try:
            return await work
        except Exception:
            raise
        except BaseException as error:
            if is_requested(error):
                raise
            raise code_error("code of the task", error) from error
        finally:
            del self._calls[task]

    def _blocker(self) -> Coroutine[Any, Any, Any] | None:
        task = asyncio.current_task(self._loop)
        return None if task is None else self._calls.get(task)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""


def _marked(marks: CallMarks, function: Callable[[], Any]) -> Any:
    with marks.running():
        return function()


async def _any_done(one: asyncio.Future[Any], other: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait for one of two futures, at most `limit_s`; return whether one is done."""
    first = asyncio.FIRST_COMPLETED
    return bool((await asyncio.wait([one, other], timeout=limit_s, return_when=first))[0])


class TaskRunner:
    """A task, and how its functions are called; each call may take `limit_s` seconds.

    `marks` record which call each thread runs; `run_plain` runs plain functions, by default in the
    loop's own threads.
    """

    def __init__(
        self,
        task: Task,
        limit_s: float,
        marks: CallMarks | None = None,
        run_plain: RunPlain | None = None,
    ) -> None:
        self.task = task
        self._loop, self._limit_s = TaskLoop(marks=marks), limit_s
        self.calls = TaskCalls(run_plain or self._loop.in_a_thread, limit_s)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the task's loop. Waits for it; raises as `TaskLoop.run`."""
        return await self._loop.run(work, self._limit_s)

    async def with_row(self, episode: Episode) -> Episode:
        """Return an episode with its row; call it on the task's loop."""
        if episode.payload:
            return episode
        what = f"making {episode.split} episode {episode.index} of task {self.task.name!r}"
        return await self.calls(what, self.task.episode, episode.split, episode.index)

    async def begin_episode(self, episode: Episode) -> tuple[RunningEpisode, list[Message]]:
        """Begin an episode; return it with its first messages. Call it on the task's loop."""
        session = RunningEpisode(self.task, await self.with_row(episode), self.calls)
        try:
            return session, await session.begin()
        except BaseException as failed:
            try:
                await session.close()
            except TaskError as error:
                failed.add_note(f"closing it failed too: {error}")
            raise
