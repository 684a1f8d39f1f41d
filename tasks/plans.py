"""Plans: the tool calls that solve a problem, and how many of them a conversation has completed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.mistakes import as_number, calls_and_results
from composer_mesh.tasks.numbers import Number


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference to the result of an earlier step of a plan."""

    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a plan; argument values may be references to earlier results."""

    tool: str
    arguments: dict[str, Any]

    def call(self, results: Sequence[Number]) -> ToolCall:
        filled = {
            name: results[value.step] if isinstance(value, Reference) else value
            for name, value in self.arguments.items()
        }
        return ToolCall(self.tool, filled)


def question_of(messages: Sequence[Message]) -> str:
    """Return the first user message; raise ValueError if there is none."""
    for message in messages:
        if message["role"] == "user":
            return str(message["content"])
    raise ValueError(f"{len(messages)} messages hold no user message: begin with the question")


def plan_results(steps: Sequence[Step], messages: Sequence[Message]) -> list[Number]:
    """Return the results of the plan's completed steps, in the plan's order.

    Other calls, and failed calls of the plan, are ignored.
    """
    results: list[Number] = []
    for call, content in calls_and_results(messages):
        if len(results) < len(steps) and call == steps[len(results)].call(results):
            number = as_number(content)
            if number is not None:
                results.append(number)
    return results


def next_call(steps: Sequence[Step], results: Sequence[Number]) -> str:
    """Return the action text of the first step without a result."""
    call = steps[len(results)].call(results)
    return call_text(call.name, call.arguments)
