"""An episode that is played by ordinary code, with the time limits of a run.

The task's code runs on an event loop and in daemon threads of its own, so that code which never
returns holds up neither its caller nor the end of the command.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.errors import TaskError, UnusableTask
from composer_mesh.tasks.group_scoring import score_group
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopBlocked, TaskLoop

T = TypeVar("T")


class TimedEpisode:
    """One running episode, as a context manager that closes it.

    Each call raises an error of tasks where the task's code raises, or takes longer than `limit_s`.
    """

    def __init__(self, task: Task, episode: Episode, limit_s: float) -> None:
        self._task, self._episode, self._limit_s = task, episode, limit_s
        self._calls, self._loop = Calls(in_a_daemon_thread, limit_s), TaskLoop()
        self._running: RunningEpisode | None = None
        self._blocked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        """Close the session, also after an error; that one is raised, with a note of another."""
        if self._running is None or self._blocked:
            return
        try:
            self._run(self._running.close())
        except TaskError as second:
            if error is None:
                raise
            error.add_note(str(second))

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._opened.messages

    def begin(self) -> list[Message]:
        """Make the episode and start its session; return the first messages."""
        return self._run(self._begun())

    def expert(self) -> str:
        """Return the action of the task's expert."""
        what = f"the expert of task {self._task.name!r}"
        return str(self._run(self._calls(what, self._task.expert, self.messages)))

    def step(self, text: str) -> StepResult:
        """Apply an action of the agent."""
        return self._run(self._opened.step(text))

    def outcome(self) -> Outcome:
        """Score the episode, ended or not."""
        return self._run(self._opened.outcome())

    def score_group(self, group: list[FinishedRollout]) -> GroupScore:
        """Score rollouts of this episode together."""
        scoring = score_group(self._task, self._opened.episode, group, self._calls)
        return self._run(scoring)

    @property
    def _opened(self) -> RunningEpisode:
        if self._running is None:
            raise RuntimeError("this episode has not begun: call begin first")
        return self._running

    async def _begun(self) -> list[Message]:
        one = self._episode
        what = f"making {one.split} episode {one.index} of task {self._task.name!r}"
        whole = await self._calls(what, self._task.episode, one.split, one.index)
        self._running = RunningEpisode(self._task, whole, self._calls)
        return await self._running.begin()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(self._loop.run(work, self._limit_s))
        except LoopBlocked as blocked:
            self._blocked = True
            raise UnusableTask(str(blocked)) from None


async def in_a_daemon_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread that does not hold up the end of the process."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    target = partial(copy_context().run, _settle, done, function)
    threading.Thread(target=target, name="task function", daemon=True).start()
    return await asyncio.wrap_future(done)


def _settle(done: Future[Any], function: Callable[[], Any]) -> None:
    try:
        done.set_result(function())
    except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
        done.set_exception(error)
