"""Generator of realistic wrong actions from correct ones.

They make the warm start's demonstrations imperfect and the rule-based teachers fallible. Here are
the toolbox's, most of which a tool reports; `silent_mistakes` has those that a tool accepts.

Mistakes that a tool accepts, so that only the end result shows them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from composer_mesh.rollouts.tool_calls import CLOSE, ToolCall, call_text, message_text, parse_action
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.numbers import format_number

HABIT_SHARE = 0.85
WRONG_NAMES = {
    "calculator": "math", "lookup": "table", "convert": "units", "read_level": "get_level",
    "set_level": "level", "set_mode": "mode", "set_timer": "timer", "switch": "turn",
}  # fmt: skip
GIVE_UP = "I can not answer."

Mistake = Callable[[ToolCall, list[Message]], str | None]
"""Returns the text of a wrong call for a right one; None if the mistake cannot be made there."""


def of_toolbox(call: ToolCall) -> list[Mistake]:
    """Return the toolbox's mistakes that apply to a call, the habitual one first."""
    anywhere: list[Mistake] = [unknown_tool, malformed, early_answer]
    if call.name == "lookup":
        return [wrong_key, *anywhere]
    if call.arguments.get("op") == "divide" and call.arguments["a"] != call.arguments["b"]:
        return [_swapped, quoted_number, *anywhere]
    if call.name == "calculator":
        return [quoted_number, *anywhere]
    return [unknown_tool, quoted_number, *anywhere]


def unknown_tool(call: ToolCall, _: list[Message]) -> str:
    """Call a tool by a name that it does not have."""
    return call_text(WRONG_NAMES.get(call.name, "tool"), call.arguments)


def malformed(call: ToolCall, _: list[Message]) -> str:
    """Leave out the last brace of a call."""
    return call_text(call.name, call.arguments).replace(f"}}}}\n{CLOSE}", f"}}\n{CLOSE}")


def early_answer(call: ToolCall, messages: list[Message]) -> str:
    """Answer with a number from the conversation; not with zero, which might be correct."""
    results = [as_number(content) for _, content in calls_and_results(messages)]
    guesses = [number for number in [*numbers_of(call), *results] if number]
    return f"Answer: {format_number(guesses[0] if guesses else 0)}"


def wrong_key(call: ToolCall, _: list[Message]) -> str:
    """Ask for a key with a word too many."""
    return call_text(call.name, {"key": f"{call.arguments['key']} value"})


def quoted_number(call: ToolCall, _: list[Message]) -> str | None:
    """Write the first number or truth value of a call as a text."""
    quoted: dict[str, Any] = dict(call.arguments)
    name = next((n for n, v in quoted.items() if isinstance(v, int | float)), None)
    if name is None:
        return None
    quoted[name] = json.dumps(quoted[name])
    return call_text(call.name, quoted)


def _swapped(call: ToolCall, _: list[Message]) -> str:
    swapped = {**call.arguments, "a": call.arguments["b"], "b": call.arguments["a"]}
    return call_text(call.name, swapped)


def wrong_answer(right: str, messages: list[Message]) -> str:
    """Answer with a number of an earlier step instead of the last result."""
    numbers = [number for call, _ in calls_and_results(messages) for number in numbers_of(call)]
    wrong = f"Answer: {format_number(numbers[0])}" if numbers else GIVE_UP
    return wrong if wrong != right else GIVE_UP


@dataclass(frozen=True)
class MistakeKinds:
    """The mistakes of one kind of agent.

    `of_call` returns those that apply to a right call, the habitual one first, which is made with
    `habit_share`; `of_answer` returns a wrong version of a right text without a call.
    """

    of_call: Callable[[ToolCall], Sequence[Mistake]] = of_toolbox
    of_answer: Callable[[str, list[Message]], str] = wrong_answer
    habit_share: float = HABIT_SHARE


def corrupt(
    right: str,
    messages: list[Message],
    rng: random.Random,
    kinds: MistakeKinds = MistakeKinds(),
) -> str:
    """Return a wrong version of the correct action, drawn from the mistakes that apply to it."""
    action = parse_action(right)
    if not isinstance(action, ToolCall):
        return rng.choice([GIVE_UP, kinds.of_answer(right, messages)])
    made = (mistake(action, messages) for mistake in kinds.of_call(action))
    texts = [text for text in made if text is not None and text != right]
    return texts[0] if rng.random() < kinds.habit_share else rng.choice(texts)


def recover_or_give_up(right: str, rng: random.Random, recovery: float) -> str:
    """Return an imperfect agent's action after an error: correct with probability `recovery`."""
    return right if rng.random() < recovery else GIVE_UP


def numbers_of(call: ToolCall) -> list[int | float]:
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
