"""The toolbox task: questions that need one to three tool calls and end in a checked answer.

Contains the questions, their plans, and the tools that longer tasks use too.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import cast

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.tasks.numbers import (
    UNITS,
    Bounded,
    Number,
    Operation,
    calculate,
    convert_units,
    format_number,
    judged,
    read_value,
)
from composer_mesh.tasks.planned import PlannedCall, PlannedTask, ResultReference
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.tool import tool

KEYS = [
    "lamp", "rope", "book", "ring", "drum", "boat", "door", "fork", "kite", "bell", "coin", "desk",
]  # fmt: skip
TABLE_SIZE = 6
LARGEST_VALUE = 30
TOLERANCE = 1e-6
_WORDS = {"plus": "add", "minus": "subtract", "times": "multiply", "divided by": "divide"}
_TERM = r"(?:the value of (?P<{0}>[a-z]+)|(?P<{0}_n>\d+))"
_ARITHMETIC = re.compile(
    rf"What is {_TERM.format('a')}(?: (?P<op>{'|'.join(_WORDS)}) {_TERM.format('b')})?\?"
)
_CONVERSION = re.compile(
    rf"Convert {_TERM.format('a')}(?: (?P<op>times|plus) {_TERM.format('b')})?"
    r" from (?P<source>[a-z]+) to (?P<target>[a-z]+)\."
)


def plan(question: str) -> list[PlannedCall]:
    """Return the tool calls that answer a question; raise ValueError for any other question."""
    match = _ARITHMETIC.fullmatch(question) or _CONVERSION.fullmatch(question)
    if match is None:
        raise ValueError(f"{question!r} is not a toolbox question: ask one from `episode`")
    found = match.groupdict()
    steps: list[PlannedCall] = []
    value = _term(found, "a", steps)
    second = _term(found, "b", steps) if found["op"] else None
    if second is not None:
        steps.append(
            PlannedCall("calculator", {"op": _WORDS[found["op"]], "a": value, "b": second})
        )
        value = ResultReference(len(steps) - 1)
    if "source" in found:
        arguments = {"value": value, "source": found["source"], "target": found["target"]}
        steps.append(PlannedCall("convert", arguments))
    return steps


def _term(
    found: Mapping[str, str | None], name: str, steps: list[PlannedCall]
) -> Number | ResultReference:
    key, number = found[name], found[f"{name}_n"]
    if key is None:
        assert number is not None
        return int(number)
    steps.append(PlannedCall("lookup", {"key": key}))
    return ResultReference(len(steps) - 1)


class ToolboxSession(Session):
    """An episode with a calculator, a converter and a table of its own."""

    solved = False

    @tool
    def calculator(self, op: Operation, a: Bounded, b: Bounded) -> str:
        """Computes a op b."""
        return format_number(calculate(op, a, b))

    @tool
    def lookup(self, key: str) -> str:
        """Reads the value of a key."""
        return format_number(read_value(self.row["table"], key))

    @tool
    def convert(self, value: Bounded, source: str, target: str) -> str:
        """Converts a value between units."""
        return format_number(convert_units(value, source, target))

    def reply(self, text: str) -> Reply:
        reply = judged(text, lambda value: abs(value - self.row["answer"]) < TOLERANCE)
        self.solved = reply.error is None
        return reply


@reward
def solved(_: object, transcript: Transcript) -> float:
    """1 for the right answer."""
    return float(cast(ToolboxSession, transcript.session).solved)


class ToolboxTask(PlannedTask):
    """Episodes by seed. A question's hash decides its split, so no question is in both."""

    name = "toolbox"
    session_class = ToolboxSession
    solved = solved

    def plan(self, question: str) -> list[PlannedCall]:
        return plan(question)

    def generate(self, rng: random.Random) -> Row:
        table = new_table(rng)
        question = _question(rng, table)
        return {"question": question, "table": table, "answer": solution(plan(question), table)[-1]}

    def gold(self, row: Row) -> Sequence[str]:
        return gold_actions(plan(row["question"]), row["table"])

    def verified_answer(self, episode: Episode) -> str:
        return format_number(episode.payload["answer"])


def new_table(rng: random.Random) -> dict[str, Number]:
    """Return a table of keys with small values."""
    return {key: rng.randint(2, LARGEST_VALUE) for key in rng.sample(KEYS, TABLE_SIZE)}


def solution(steps: Sequence[PlannedCall], table: Mapping[str, Number]) -> list[Number]:
    """Return the results of a plan's calls."""
    results = list[Number]()
    for step in steps:
        results.append(_value(step.call(results), table))
    return results


def gold_actions(steps: Sequence[PlannedCall], table: Mapping[str, Number]) -> list[str]:
    """Return the texts of a plan's calls and of the answer."""
    results = solution(steps, table)
    calls = [step.call(results) for step in steps]
    answer = f"Answer: {format_number(results[-1])}"
    return [*(call_text(call.name, call.arguments) for call in calls), answer]


def _value(call: ToolCall, table: Mapping[str, Number]) -> Number:
    if call.name == "calculator":
        return calculate(**call.arguments)
    if call.name == "lookup":
        return read_value(table, **call.arguments)
    return convert_units(**call.arguments)


def _question(rng: random.Random, table: Mapping[str, Number]) -> str:
    first, second = (f"the value of {key}" for key in rng.sample(sorted(table), 2))
    source, target = rng.choice(sorted(UNITS))
    word = rng.choice(["plus", "times", "minus"])
    forms = (
        lambda: f"What is {_arithmetic(rng)}?",
        lambda: f"What is {first}?",
        lambda: f"Convert {rng.randint(2, LARGEST_VALUE)} from {source} to {target}.",
        lambda: f"What is {first} {word} {rng.randint(2, LARGEST_VALUE)}?",
        lambda: f"Convert {first} from {source} to {target}.",
        lambda: f"What is {first} {rng.choice(['plus', 'times'])} {second}?",
        lambda: f"Convert {first} plus {rng.randint(2, LARGEST_VALUE)} from {source} to {target}.",
    )
    return rng.choices(forms, weights=(3, 1, 1, 2, 2, 2, 1))[0]()


def _arithmetic(rng: random.Random) -> str:
    word = rng.choice(sorted(_WORDS))
    a, b = rng.randint(2, LARGEST_VALUE), rng.randint(2, LARGEST_VALUE)
    if word == "divided by":
        return f"{b * rng.choice([0, 0, 2, 3, 4])} divided by {b}"
    return f"{a} {word} {b}"
