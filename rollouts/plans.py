"""Plans: the tool calls that solve a problem, and how far a conversation has come with them.

Which calls solve what is a task's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.mistakes import as_number, calls_and_results
from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.tools import Number
from composer_mesh.rollouts.traces import Message


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of an earlier step of a plan."""

    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a plan; argument values may be results of earlier steps."""

    tool: str
    arguments: dict[str, Any]

    def call(self, results: Sequence[Number]) -> ToolCall:
        filled = {
            name: results[value.step] if isinstance(value, Reference) else value
            for name, value in self.arguments.items()
        }
        return ToolCall(self.tool, filled)


def question_of(messages: Sequence[Message]) -> str:
    """What the user asked first; raises ValueError where no user has spoken."""
    for message in messages:
        if message["role"] == "user":
            return str(message["content"])
    raise ValueError(f"{len(messages)} messages hold no user message: begin with the question")


def plan_results(steps: Sequence[Step], messages: Sequence[Message]) -> list[Number]:
    """Results of the plan's steps that the conversation has done, in the plan's order.

    Other calls, and the plan's own calls that failed, count for nothing.
    """
    results: list[Number] = []
    for call, content in calls_and_results(messages):
        if len(results) < len(steps) and call == steps[len(results)].call(results):
            number = as_number(content)
            if number is not None:
                results.append(number)
    return results


def next_call(steps: Sequence[Step], results: Sequence[Number]) -> str:
    """The action text of the first step that has no result yet."""
    call = steps[len(results)].call(results)
    return call_text(call.name, call.arguments)
