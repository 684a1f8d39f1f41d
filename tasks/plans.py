"""Plans: the tool calls that solve a problem, and how many of them a conversation has completed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ERROR_PREFIX
from composer_mesh.tasks.mistakes import as_number, calls_and_results


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference to the result of an earlier step of a plan."""

    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a plan; argument values may be references to earlier results."""

    tool: str
    arguments: dict[str, Any]

    def call(self, results: Sequence[Any]) -> ToolCall:
        filled = {
            name: results[value.step] if isinstance(value, Reference) else value
            for name, value in self.arguments.items()
        }
        return ToolCall(self.tool, filled)

    def is_like(self, call: ToolCall) -> bool:
        """Whether a call is of this tool and has the arguments that the plan itself states."""
        stated = {k: v for k, v in self.arguments.items() if not isinstance(v, Reference)}
        return call.name == self.tool and stated.items() <= call.arguments.items()


def question_of(messages: Sequence[Message]) -> str:
    """Return the first user message; raise ValueError if there is none."""
    for message in messages:
        if message["role"] == "user":
            return str(message["content"])
    raise ValueError(f"{len(messages)} messages hold no user message: begin with the question")


def value_or_text(content: str) -> Any:
    """Return the number in a tool's response, or the response; None if it is an error."""
    if content.startswith(ERROR_PREFIX):
        return None
    number = as_number(content)
    return content if number is None else number


def plan_results(
    steps: Sequence[Step], messages: Sequence[Message], read: Callable[[str], Any] = as_number
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


def accepted_results(
    steps: Sequence[Step], messages: Sequence[Message], read: Callable[[str], Any]
) -> list[Any]:
    """Return the results of the plan as one sees them who takes accepted calls for right.

    A call stands for the first open step that it is like, whose predecessors are skipped, or else
    for the next step. Skipped steps have the latest result.
    """
    results: list[Any] = []
    for call, content in calls_and_results(messages):
        result = read(content)
        if result is None or len(results) == len(steps):
            continue
        at = len(results)
        like = next((n for n in range(at, len(steps)) if steps[n].is_like(call)), at)
        results += [results[-1] if results else result] * (like - at)
        results.append(result)
    return results


def next_call(steps: Sequence[Step], results: Sequence[Any]) -> str:
    """Return the action text of the first step without a result."""
    call = steps[len(results)].call(results)
    return call_text(call.name, call.arguments)


def skipped_call(steps: Sequence[Step], results: Sequence[Any]) -> str | None:
    """Return the action text of one who forgets the next step; None where none follows it."""
    if not results or len(results) + 1 >= len(steps):
        return None
    return next_call(steps, [*results, results[-1]])
