"""Mistakes that a tool accepts, so that only the end result shows them."""

from __future__ import annotations

from typing import Any

from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.mistakes import as_number, calls_and_results, numbers_of

CONFUSED = {"add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply"}
"""Operations, and for which each is taken by mistake."""


def off_by_one(call: ToolCall, _: list[Message]) -> str | None:
    """Write the last number of a call one too low, or a 1 too high; None without a number."""
    numbers = numbers_of(call)
    if not numbers:
        return None
    name = [name for name, value in call.arguments.items() if value is numbers[-1]][-1]
    wrong = numbers[-1] - 1 if numbers[-1] > 1 else numbers[-1] + 1
    return call_text(call.name, {**call.arguments, name: wrong})


def stale_value(call: ToolCall, messages: list[Message]) -> str | None:
    """Use an older result in place of the latest; None where the call uses no result twice had."""
    read = (as_number(content) for _, content in calls_and_results(messages))
    results = [value for value in read if value is not None]
    older = next((value for value in reversed(results) if value != results[-1]), None)
    if older is None:
        return None
    return call_text(
        call.name,
        {name: _replaced(value, results[-1], older) for name, value in call.arguments.items()},
    )


def wrong_operation(call: ToolCall, _: list[Message]) -> str | None:
    """Take an operation for another one; None for a call without an operation."""
    confused = CONFUSED.get(str(call.arguments.get("op")))
    return confused and call_text(call.name, {**call.arguments, "op": confused})


def _replaced(value: Any, old: int | float, new: int | float) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return new if is_number and value == old else value
