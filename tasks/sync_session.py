"""A running episode with plain methods, for tests, demonstrations and the terminal."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task

T = TypeVar("T")
_threads = threading.local()


class SyncSession:
    """One running episode. A task with coroutines can only be used outside event loops.

    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("<tool_call>…</tool_call>")
        print(session.outcome().reward)
    """

    def __init__(self, task: Task, episode: Episode) -> None:
        """Start the episode."""
        self._run = _run if _has_coroutines(task.of(episode.task)) else _finished
        whole = episode if episode.payload else task.episode(episode.split, episode.index)
        self._running = RunningEpisode(task, whole)
        self._run(self._running.begin())

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._running.messages

    def state(self, turn: int) -> list[Message]:
        """Return exactly what the agent saw when it acted at `turn` (0-based)."""
        return self._running.state(turn)

    def step(self, text: str) -> StepResult:
        """Apply an action of the agent."""
        return self._run(self._running.step(text))

    def outcome(self) -> Outcome:
        """Score the episode, ended or not."""
        return self._run(self._running.outcome())

    def close(self) -> None:
        """Release the session."""
        self._run(self._running.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_coroutines(task: Task) -> bool:
    """Whether any function of a task may have to wait."""
    session = task.session_class
    methods = [session.start, session.opening, session.reply, session.close]
    methods += [spec.function for spec in task.own_tools.values()]
    methods += [one.function for one in (*task.rewards, *task.turn_rewards)]
    methods += [task.success, task.verified_answer]
    return any(map(inspect.iscoroutinefunction, methods))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise RuntimeError("a task without coroutines has waited for something")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of this thread, which all of its sessions share."""
    runner: asyncio.Runner | None = getattr(_threads, "runner", None)
    if runner is None:
        runner = _threads.runner = asyncio.Runner()
        atexit.register(runner.close)
    return runner.run(work)
