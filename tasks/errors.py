"""Errors of tasks: those of an agent's action, and those of a task's own code.

TaskError
+-- ToolError        the agent's action was wrong: it reads the text, and may be given a hint
+-- TaskTimeout      a function of the task did not return in time
+-- TaskProcessEnded a function of the task held or ended the process that it ran in
+-- ToolServerLost   a server of tools is gone: the episode is played again, maybe elsewhere
+-- TaskCodeError    a function of the task raised: the episode fails, and the line is named
+-- UnusableTask     the task cannot be loaded, or returned what it must not return
+-- JudgeFailed      a judge gave no usable answer: the attempt fails, not the episode
+-- JudgesSpent      the judges' ceiling allows no further question

DataError, a ValueError, is about the file of a task that ships.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.configs.user_code import PACKAGE, frame_of, frame_of_function, where_of
from composer_mesh.configs.worded import Worded

CALLERS = frozenset({"calls.py", "running.py", "task_loop.py"})
LONGEST = 500
ERROR_PREFIX = "error: "
"""What the agent reads before the text of an error."""


class TaskError(Exception):
    """Base class of the errors of tasks; `frame` is the line of the task's code, where known."""

    failure_class = "data"
    frame = ""


class ToolError(TaskError):
    """An action of the agent that failed.

    `kind` names the error, `text` is shown to the agent, `facts` fill the fields of the hint
    template `hint`. Without `hint` it is the template with the name of the kind, or a general one.
    `turn` is the agent's turn (0 is its first) in which the mistake was made; without it, the
    present one.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        facts: Mapping[str, str] | None = None,
        hint: str | None = None,
        *,
        turn: int | None = None,
    ) -> None:
        super().__init__(kind, text, facts, hint)
        self.kind, self.text, self.hint, self.turn = kind, text, hint, turn
        self.facts = dict(facts or {})


class TaskCodeError(TaskError):
    """A function of a task raised an exception; `where` is the line in the task's own code."""

    def __init__(self, what: str, where: str, problem: str, frame: str = "") -> None:
        super().__init__(what, where, problem, frame)
        self.what, self.where, self.problem, self.frame = what, where, problem, frame

    def __str__(self) -> str:
        return f"{self.what} failed at {self.where}: {self.problem}"


class TaskTimeout(TaskError):
    """A function of a task did not return within `limit_s` seconds."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what, limit_s)
        self.what, self.limit_s = what, limit_s

    def __str__(self) -> str:
        return (
            f"{self.what} did not return within {self.limit_s:g} s: look for a loop or a wait "
            "without end in it, or raise environment.call_s"
        )


class TaskProcessEnded(Worded, TaskError):
    """A call of a task's code held the interpreter of its process, or ended that process."""

    message = (
        "{0} {1}: correct that line, run it in a process of its own, or give a long computation "
        "more time by environment.hang_s"
    )


class ToolServerLost(Worded, TaskError):
    """A server of tools cannot be reached, or has ended under a call. Never the agent's error."""

    failure_class = "infrastructure"
    message = "MCP server {0!r}: {1}"


class UnusableTask(TaskError, ValueError):
    """A task cannot be loaded, or one of its functions returned an unusable value."""

    def __str__(self) -> str:
        text, where = super().__str__(), where_of(self.frame)
        return text if where in text else f"{text} ({where})"


class DataError(ValueError):
    """A problem file cannot be used; the message names the line, the value and the repair."""


class JudgeFailed(Worded, TaskError):
    """A judge gave no usable answer, so that an attempt at an episode has no reward."""

    failure_class = "provider"
    message = "judge {0!r} gave no usable answer: {1}"


class JudgesSpent(Worded, TaskError):
    """A question to a judge might pass the judges' ceiling, so it was not sent."""

    failure_class = "provider"
    message = "{1}"


@contextmanager
def code_of_task(what: str, *known: type[BaseException]) -> Iterator[None]:
    """Turn what a block raises into the error of a task's function, except for `known` errors."""
    try:
        yield
    except known:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise code_error(what, error) from error


def code_error(what: str, error: BaseException) -> TaskCodeError:
    """Return the error of a task's function that raised `error`; call it where that was caught."""
    frame = frame_of(error, calls_tasks)
    problem = f"{type(error).__name__}: {shown(error, LONGEST)}"[:LONGEST]
    return TaskCodeError(what, where_of(frame), problem, frame)


@contextmanager
def returned_by(function: Callable[..., Any]) -> Iterator[None]:
    """Name a function of a task in the error about what it returned."""
    try:
        yield
    except UnusableTask as error:
        error.frame = error.frame or frame_of_function(function)
        raise


def shown(value: object, most: int = 40) -> str:
    """Return the start of a value's text; where it has none, as of integers too long, say so."""
    try:
        return str(value)[:most]
    except Exception as error:  # noqa: BLE001 whatever a stranger's __str__ raises
        return f"<a {type(value).__name__} whose text fails by {type(error).__name__}>"[:most]


def calls_tasks(file: str) -> bool:
    """Whether a file of ours only calls the functions of tasks, and is not where one fails."""
    path = Path(file)
    return path.parent == PACKAGE / "tasks" and path.name in CALLERS
