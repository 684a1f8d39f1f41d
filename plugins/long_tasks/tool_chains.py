"""The task "tool_chains": a chain of tool calls, each on the result of the one before.

The tools are the toolbox's. One wrong call spoils the result, and only the result is rewarded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import cast

from composer_mesh.plugins.long_tasks.long_task import LongTask
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import ToolCall
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.mistakes import Mistake, of_toolbox, wrong_answer, wrong_operation
from composer_mesh.tasks.numbers import UNITS, Number, format_number
from composer_mesh.tasks.planned import PlannedCall, ResultReference
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply
from composer_mesh.tasks.toolbox import ToolboxSession, gold_actions, new_table, solution, solved

LARGEST_RESULT = 999
DRAWS = 1000
_WORDS = {"add": "add", "subtract": "subtract", "multiply by": "multiply"}
_TERM = r"(?:the value of (?P<key>[a-z]+)|(?P<number>\d+))"
_START = re.compile(rf"Take {_TERM}")
_CLAUSE = re.compile(
    rf"(?P<word>{'|'.join(_WORDS)}) {_TERM}|convert from (?P<source>[a-z]+) to (?P<target>[a-z]+)"
)


def plan(question: str) -> list[PlannedCall]:
    """Return the calls of a chain; raise ValueError for any other question."""
    start, *clauses = question.removesuffix(".").split(", ")
    found = [_START.fullmatch(start), *map(_CLAUSE.fullmatch, clauses)]
    if None in found or not clauses or not question.endswith("."):
        raise ValueError(f"{question!r} is not a chain of tool calls: ask one from `episode`")
    steps: list[PlannedCall] = []
    value: Number | ResultReference = 0
    for match in found:
        assert match is not None
        value = _append(match, value, steps)
    return steps


def _append(
    match: re.Match[str], value: Number | ResultReference, steps: list[PlannedCall]
) -> Number | ResultReference:
    """Append the calls of one clause to those before; return the value after it."""
    clause = match.groupdict()
    if clause.get("source"):
        steps.append(
            PlannedCall(
                "convert", {"value": value, "source": clause["source"], "target": clause["target"]}
            )
        )
        return ResultReference(len(steps) - 1)
    operand: Number | ResultReference
    if clause["key"]:
        steps.append(PlannedCall("lookup", {"key": clause["key"]}))
        operand = ResultReference(len(steps) - 1)
    else:
        operand = int(clause["number"])
    if "word" not in clause:
        return operand
    steps.append(
        PlannedCall("calculator", {"op": _WORDS[clause["word"]], "a": value, "b": operand})
    )
    return ResultReference(len(steps) - 1)


class ChainSession(ToolboxSession):
    """An episode whose wrong answer is an error of the call that spoiled it."""

    def reply(self, text: str) -> Reply:
        reply = super().reply(text)
        if reply.error is None or reply.error.kind != "wrong_answer":
            return reply
        task = cast(ToolChains, self.task)
        return Reply(error=task.located(reply.error, self.conversation))


class ToolChains(LongTask):
    """Episodes by seed, of `calls` calls. A question's hash decides its split."""

    name = "tool_chains"
    session_class = ChainSession
    solved = solved

    def plan(self, question: str) -> list[PlannedCall]:
        return plan(question)

    def words_of_steps(self, question: str) -> list[str]:
        clauses = question.removesuffix(".").removeprefix("Take ").split(", ")
        words = [] if clauses[0].isdigit() else [clauses[0]]
        for clause in clauses[1:]:
            _, value, key = clause.partition("the value of ")
            words += [value + key, clause] if key else [clause]
        return words

    def generate(self, rng: random.Random) -> Row:
        for _ in range(DRAWS):
            table = new_table(rng)
            question = f"Take {', '.join(_clauses(rng, sorted(table), self.calls))}."
            *results, answer = solution(plan(question), table)
            if all(2 <= value <= LARGEST_RESULT for value in (*results, answer)):
                return {"question": question, "table": table, "answer": answer}
        raise AssertionError(f"no chain of {self.calls} calls in {DRAWS} draws")

    def gold(self, row: Row) -> Sequence[str]:
        return gold_actions(plan(row["question"]), row["table"])

    def verified_answer(self, episode: Episode) -> str:
        return format_number(episode.payload["answer"])

    def mistakes_of(self, call: ToolCall) -> Sequence[Mistake]:
        return [*of_toolbox(call), wrong_operation]

    def wrong_end(self, right: str, messages: list[Message]) -> str:
        return wrong_answer(right, messages)


def _clauses(rng: random.Random, keys: Sequence[str], calls: int) -> Iterator[str]:
    """Yield clauses that take exactly `calls` calls; no two of them are the same."""
    free, said = rng.sample(keys, len(keys)), set[str]()
    looks_up = rng.random() < 0.5
    yield f"the value of {free.pop()}" if looks_up else str(rng.randint(2, 30))
    left = calls - looks_up
    while left:
        clause = _clause(rng, free if left > 1 else [])
        if clause not in said:
            said.add(clause)
            left -= 2 if "value" in clause else 1
            yield clause


def _clause(rng: random.Random, keys: list[str]) -> str:
    kind = rng.choices(["number", "key", "convert"], weights=(5, 3 if keys else 0, 2))[0]
    if kind == "convert":
        return "convert from {} to {}".format(*rng.choice(sorted(UNITS)))
    if kind == "key":
        return f"{rng.choice(['add', 'subtract'])} the value of {keys.pop()}"
    word = rng.choice(sorted(_WORDS))
    return f"{word} {rng.randint(2, 4 if word == 'multiply by' else 30)}"
