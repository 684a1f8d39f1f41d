"""Runs episodes of a task: each call on the task's own loop and threads, within a time limit."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.call_marks import CallMarks
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.errors import TaskError
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskLoop

T = TypeVar("T")


class TaskRunner:
    """A task, and how its functions are called; each call may take `limit_s` seconds.

    `marks` record which call each thread runs.
    """

    def __init__(self, task: Task, limit_s: float, marks: CallMarks | None = None) -> None:
        self.task = task
        self._loop, self._limit_s = TaskLoop(marks=marks), limit_s
        self.calls = Calls(self._loop.in_a_thread, limit_s)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the task's loop. Waits for it; raises as `TaskLoop.run`."""
        return await self._loop.run(work, self._limit_s)

    async def with_row(self, episode: Episode) -> Episode:
        """Return an episode with its row; call it on the task's loop."""
        if episode.payload:
            return episode
        what = f"making {episode.split} episode {episode.index} of task {self.task.name!r}"
        whole: Episode = await self.calls(what, self.task.episode, episode.split, episode.index)
        return whole

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
