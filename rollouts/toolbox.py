"""The toolbox task: questions that need one to three tool calls and end in a checked answer.

Contains the questions, their plans, and the expert that derives the plan from a conversation.
"""

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any

from composer_mesh.rollouts import mistakes
from composer_mesh.rollouts.plans import Reference, Step, next_call, plan_results, question_of
from composer_mesh.rollouts.session import ToolSession
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tools import (
    UNITS,
    Number,
    Tool,
    calculator,
    converter,
    execute,
    format_number,
    lookup,
)
from composer_mesh.rollouts.traces import Message, Split

KEYS = [
    "lamp", "rope", "book", "ring", "drum", "boat", "door", "fork", "kite", "bell", "coin", "desk",
]  # fmt: skip
TABLE_SIZE = 6
LARGEST_VALUE = 30
HELDOUT_SHARE = 0.25
_WORDS = {"plus": "add", "minus": "subtract", "times": "multiply", "divided by": "divide"}
_TERM = r"(?:the value of (?P<{0}>[a-z]+)|(?P<{0}_n>\d+))"
_ARITHMETIC = re.compile(
    rf"What is {_TERM.format('a')}(?: (?P<op>{'|'.join(_WORDS)}) {_TERM.format('b')})?\?"
)
_CONVERSION = re.compile(
    rf"Convert {_TERM.format('a')}(?: (?P<op>times|plus) {_TERM.format('b')})?"
    r" from (?P<source>[a-z]+) to (?P<target>[a-z]+)\."
)


def plan(question: str) -> list[Step]:
    """Return the tool calls that answer a question; raise ValueError for any other question."""
    match = _ARITHMETIC.fullmatch(question) or _CONVERSION.fullmatch(question)
    if match is None:
        raise ValueError(f"{question!r} is not a toolbox question: ask one from `episode`")
    found = match.groupdict()
    steps: list[Step] = []
    value = _term(found, "a", steps)
    second = _term(found, "b", steps) if found["op"] else None
    if second is not None:
        steps.append(Step("calculator", {"op": _WORDS[found["op"]], "a": value, "b": second}))
        value = Reference(len(steps) - 1)
    if "source" in found:
        arguments = {"value": value, "source": found["source"], "target": found["target"]}
        steps.append(Step("convert", arguments))
    return steps


def _term(found: Mapping[str, str | None], name: str, steps: list[Step]) -> Number | Reference:
    key, number = found[name], found[f"{name}_n"]
    if key is None:
        assert number is not None
        return int(number)
    steps.append(Step("lookup", {"key": key}))
    return Reference(len(steps) - 1)


class ToolboxTask:
    """Episodes by seed. A question's hash decides its split, so no question is in both."""

    name = "toolbox"

    def __init__(self, seed: int, max_turns: int = 6, penalty: float = 0.0) -> None:
        self._seed, self._max_turns, self._penalty = seed, max_turns, penalty
        self.tools = [tool.schema() for tool in self._toolbox({}).values()]

    def episode(self, split: Split, index: int) -> Episode:
        for attempt in range(10_000):
            rng = random.Random(f"{self._seed}:{split}:{index}:{attempt}")
            table: dict[str, Number] = {
                key: rng.randint(2, LARGEST_VALUE) for key in rng.sample(KEYS, TABLE_SIZE)
            }
            question = _question(rng, table)
            if split_of(question) == split:
                return Episode(self.name, split, index, self._payload(question, table))
        raise RuntimeError(f"no {split} question in 10,000 draws: widen the question space")

    def session(self, episode: Episode) -> ToolSession:
        payload = episode.payload
        opening = [{"role": "user", "content": payload["question"]}]

        def correct(value: float) -> bool:
            return abs(value - payload["answer"]) < 1e-6

        tools = self._toolbox(payload["table"])
        return ToolSession(opening, tools, correct, self._max_turns, self._penalty)

    def answer(self, episode: Episode) -> str:
        return format_number(episode.payload["answer"])

    def expert(self, messages: list[Message]) -> str:
        """Return the next correct action: the plan's first call that has not succeeded yet."""
        steps = plan(question_of(messages))
        results = plan_results(steps, messages)
        if len(results) < len(steps):
            return next_call(steps, results)
        return f"Answer: {format_number(results[-1])}"

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return mistakes.corrupt(self.expert(messages), messages, rng)

    def _toolbox(self, table: Mapping[str, Number]) -> dict[str, Tool]:
        return {tool.name: tool for tool in (calculator(), lookup(table), converter())}

    def _payload(self, question: str, table: dict[str, Number]) -> dict[str, Any]:
        tools, results = self._toolbox(table), list[Number]()
        for step in plan(question):
            results.append(execute(tools, step.call(results)))
        return {"question": question, "table": table, "answer": results[-1]}


def split_of(question: str) -> Split:
    """Return the split of a question, from a hash of its text."""
    digest = hashlib.sha256(question.encode()).digest()
    return "heldout" if digest[0] < HELDOUT_SHARE * 256 else "train"


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
