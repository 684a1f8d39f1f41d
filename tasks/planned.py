"""Tasks whose questions have a plan: the tool calls that solve them, which an expert derives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.mistakes import (
    as_number,
    calls_and_results,
    corrupt,
)
from composer_mesh.tasks.numbers import format_number
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.task import Task


@dataclass(frozen=True, slots=True)
class ResultReference:
    """Reference to the result of an earlier step of a plan."""

    step: int


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a plan; argument values may be references to earlier results."""

    tool: str
    arguments: dict[str, Any]

    def call(self, results: Sequence[Any]) -> ToolCall:
        filled = {
            name: results[value.step] if isinstance(value, ResultReference) else value
            for name, value in self.arguments.items()
        }
        return ToolCall(self.tool, filled)

    def is_like(self, call: ToolCall) -> bool:
        """Whether a call is of this tool and has the arguments that the plan itself states."""
        stated = {k: v for k, v in self.arguments.items() if not isinstance(v, ResultReference)}
        return call.name == self.tool and stated.items() <= call.arguments.items()


def question_of(messages: Sequence[Message]) -> str:
    """Return the first user message; raise ValueError if there is none."""
    for message in messages:
        if message["role"] == "user":
            return str(message["content"])
    raise ValueError(f"{len(messages)} messages hold no user message: begin with the question")


def plan_results(
    steps: Sequence[PlannedCall],
    messages: Sequence[Message],
    read: Callable[[str], Any] = as_number,
) -> list[Any]:
    """Return the results of the plan's completed steps, in the plan's order.

    Other calls, and failed calls of the plan, are ignored. `read` returns the result in a tool's
    response, and None if the call failed.
    """
    results: list[Any] = []
    for call, content in calls_and_results(messages):
        if len(results) < len(steps) and call == steps[len(results)].call(results):
            result = read(content)
            if result is not None:
                results.append(result)
    return results


def next_call(steps: Sequence[PlannedCall], results: Sequence[Any]) -> str:
    """Return the action text of the first step without a result."""
    call = steps[len(results)].call(results)
    return call_text(call.name, call.arguments)


class PlannedTask(Task):
    """Episodes whose first message is the row's `question`, which has a plan."""

    def plan(self, question: str) -> list[PlannedCall]:
        """Return the calls that solve a question; raise ValueError for any other question."""
        raise UnusableTask(f"task {self.name!r} has no plans: define plan(self, question)")

    def result_of(self, content: str) -> Any:
        """Return the result in a tool's response; None if the call failed."""
        return as_number(content)

    def last_words(self, results: Sequence[Any]) -> str:
        """Return the text after the last call, from the results of the plan."""
        return f"Answer: {format_number(results[-1])}"

    def identity(self, row: Row) -> str:
        return str(row["question"])

    def prompt(self, row: Row) -> str:
        return str(row["question"])

    def expert(self, messages: list[Message]) -> str:
        """Return the next correct action: the plan's first call that has not succeeded yet."""
        steps = self.plan(question_of(messages))
        return self._next(steps, plan_results(steps, messages, self.result_of))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return corrupt(self.expert(messages), messages, rng)

    def _next(self, steps: Sequence[PlannedCall], results: Sequence[Any]) -> str:
        return next_call(steps, results) if len(results) < len(steps) else self.last_words(results)
