"""An episode for ordinary code: each call has a limit, and its session is closed in any case."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from composer_mesh import Row, Session, Task, ToolError, Transcript, reward, tool
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.services.checks.task import TimedEpisode
from composer_mesh.tasks.errors import TaskCodeError, TaskTimeout, UnusableTask

CLOSED: list[str] = []
RELEASED = threading.Event()


class Trouble(Session):
    @tool
    def work(self) -> str:
        """Works."""
        return str(threading.current_thread().daemon)

    @tool
    async def block(self) -> str:
        """Blocks the event loop."""
        RELEASED.wait()
        return ""

    async def reply(self, text: str) -> Any:
        if text == "wrong":
            raise ToolError("wrong", "that is wrong")
        if text == "hang":
            await asyncio.Event().wait()
        raise KeyError(text)

    def close(self) -> None:
        CLOSED.append(self.row["name"])
        if self.row["name"] == "bad":
            raise OSError("it cannot be closed")


class TroubleTask(Task):
    session_class = Trouble
    name_of_rows = "good"

    def rows(self, split: str) -> list[Row]:
        return [{"name": self.name_of_rows}]

    def prompt(self, row: Row) -> str:
        return "?"

    @reward
    def one(self, transcript: Transcript) -> float:
        return 1.0


@pytest.fixture
def task() -> TroubleTask:
    CLOSED.clear()
    return TroubleTask.create()


def opened(task: Task, limit_s: float = 30.0) -> TimedEpisode:
    return TimedEpisode(task, task.pick("train", 0), limit_s)


def test_plain_functions_run_in_threads_that_hold_up_no_exit(task: TroubleTask) -> None:
    with opened(task) as episode:
        episode.begin()
        assert episode.step(call_text("work", {})).messages[0]["content"] == "True"
        assert episode.outcome().reward == 1.0
        assert CLOSED == []
    assert CLOSED == ["good"]


def play(task: Task, *actions: str, limit_s: float = 30.0) -> None:
    with opened(task, limit_s) as episode:
        episode.begin()
        for action in actions:
            episode.step(action)


def test_a_session_is_closed_after_an_error_which_is_the_one_that_is_raised(
    task: TroubleTask,
) -> None:
    with pytest.raises(TaskCodeError, match="KeyError: 'x'") as good:
        play(task, "x")
    task.name_of_rows = "bad"
    with pytest.raises(TaskCodeError, match="KeyError: 'x'") as bad:
        play(task, "x")
    assert CLOSED == ["good", "bad"]
    assert not hasattr(good.value, "__notes__")
    assert "it cannot be closed" in bad.value.__notes__[0]


def test_an_error_at_the_close_is_raised_where_there_was_none(task: TroubleTask) -> None:
    task.name_of_rows = "bad"
    with pytest.raises(TaskCodeError, match="it cannot be closed"):
        play(task)


def test_a_function_that_does_not_return_is_named_with_its_limit(task: TroubleTask) -> None:
    with pytest.raises(TaskTimeout, match=r"reply of task .* within 5 s"):
        play(task, "hang", limit_s=5.0)


def test_a_coroutine_that_blocks_its_loop_is_named_with_its_line(task: TroubleTask) -> None:
    try:
        with pytest.raises(UnusableTask, match=r"(?s)blocked its event loop.*RELEASED\.wait"):
            play(task, call_text("block", {}), limit_s=3.0)
    finally:
        RELEASED.set()
    assert CLOSED == []  # nothing can be called on a loop that is blocked
