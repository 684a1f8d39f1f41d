"""Generator of realistic wrong actions from correct ones.

They make the warm start's demonstrations imperfect and the rule-based teachers fallible.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from composer_mesh.rollouts.tool_calls import CLOSE, ToolCall, call_text, message_text, parse_action
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.numbers import format_number

HABIT_SHARE = 0.85
WRONG_NAMES = {"calculator": "math", "lookup": "table", "convert": "units"}
GIVE_UP = "I can not answer."


def corrupt(right: str, messages: list[Message], rng: random.Random) -> str:
    """Return a wrong version of the correct action, drawn from the mistakes that apply to it."""
    action = parse_action(right)
    if not isinstance(action, ToolCall):
        return rng.choice([GIVE_UP, _wrong_answer(right, messages)])
    kinds = _applicable(action)
    mistake = kinds[0] if rng.random() < HABIT_SHARE else rng.choice(kinds)
    return mistake(action, messages)


def recover_or_give_up(right: str, rng: random.Random, recovery: float) -> str:
    """Return an imperfect agent's action after an error: correct with probability `recovery`."""
    return right if rng.random() < recovery else GIVE_UP


Mistake = Callable[[ToolCall, list[Message]], str]


def _applicable(call: ToolCall) -> list[Mistake]:
    """Return the mistakes that apply to a call, the habitual one first."""
    anywhere: list[Mistake] = [_unknown_tool, _malformed, _early_answer]
    if call.name == "lookup":
        return [_wrong_key, *anywhere]
    if call.arguments.get("op") == "divide" and call.arguments["a"] != call.arguments["b"]:
        return [_swapped, _quoted_number, *anywhere]
    if call.name == "calculator":
        return [_quoted_number, *anywhere]
    return [_unknown_tool, _quoted_number, *anywhere]


def _unknown_tool(call: ToolCall, _: list[Message]) -> str:
    return call_text(WRONG_NAMES.get(call.name, "tool"), call.arguments)


def _malformed(call: ToolCall, _: list[Message]) -> str:
    return call_text(call.name, call.arguments).replace(f"}}}}\n{CLOSE}", f"}}\n{CLOSE}")


def _early_answer(call: ToolCall, messages: list[Message]) -> str:
    """Answer with a number from the conversation; not with zero, which might be correct."""
    results = [as_number(content) for _, content in calls_and_results(messages)]
    guesses = [number for number in [*_numbers(call), *results] if number]
    return f"Answer: {format_number(guesses[0] if guesses else 0)}"


def _wrong_key(call: ToolCall, _: list[Message]) -> str:
    return call_text(call.name, {"key": f"{call.arguments['key']} value"})


def _quoted_number(call: ToolCall, _: list[Message]) -> str:
    quoted: dict[str, Any] = dict(call.arguments)
    name = next(n for n, v in quoted.items() if isinstance(v, int | float))
    quoted[name] = str(quoted[name])
    return call_text(call.name, quoted)


def _swapped(call: ToolCall, _: list[Message]) -> str:
    swapped = {**call.arguments, "a": call.arguments["b"], "b": call.arguments["a"]}
    return call_text(call.name, swapped)


def _wrong_answer(right: str, messages: list[Message]) -> str:
    """Answer with a number of an earlier step instead of the last result."""
    numbers = [number for call, _ in calls_and_results(messages) for number in _numbers(call)]
    wrong = f"Answer: {format_number(numbers[0])}" if numbers else GIVE_UP
    return wrong if wrong != right else GIVE_UP


def _numbers(call: ToolCall) -> list[int | float]:
    """Return the numeric arguments of a call in order."""
    values = call.arguments.values()
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def calls_and_results(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str]]:
    """Yield each tool call of a conversation with the tool's response."""
    for message, answer in pairwise(messages):
        if message["role"] == "assistant" and answer["role"] == "tool":
            action = parse_action(message_text(message))
            if isinstance(action, ToolCall):
                yield action, answer["content"]


def as_number(content: str) -> int | float | None:
    """Parse the number in a tool's response; None if the response is an error."""
    try:
        value = float(content)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value
