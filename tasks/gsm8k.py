"""Math word problems from a GSM8K-format JSONL: a calculator and a numeric answer check.

A line is a question, worked annotations and a final number. The expert turns the annotations into
calculator calls: `(3+4)*2` becomes two, the second of which refers to the result of the first.
Expressions are only parsed; the calculator evaluates them. A file is parsed once per process as
long as it does not change.
"""

import ast
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from composer_mesh.configs.validation import place_and_text, validated_json
from composer_mesh.rollouts.consensus import read_answer
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import DataError, ToolError
from composer_mesh.tasks.mistakes import GIVE_UP, as_number, corrupt
from composer_mesh.tasks.numbers import (
    LARGEST,
    Bounded,
    Number,
    Operation,
    calculate,
    format_number,
    judged,
)
from composer_mesh.tasks.planned import (
    PlannedCall,
    ResultReference,
    next_call,
    plan_results,
    question_of,
)
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import COLUMN, Row, held_out, read_rows
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import tool

LONGEST = 200
_ARITHMETIC = re.compile(r"[\d.,+*/()%\s-]*", re.ASCII)
_NUMBER = re.compile(r"(\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(\s*%)?", re.ASCII)
_OPERATIONS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}

Operand = Number | ResultReference


class NotArithmetic(ValueError):
    """The text contains anything but numbers, `+ - * / %` and parentheses."""


def append_steps(text: str, steps: list[PlannedCall]) -> Operand:
    """Append the calls that compute `text` to `steps`; return the operand that holds the result.

    Raises NotArithmetic, possibly after some steps were appended.
    """
    if len(text) > LONGEST or not _ARITHMETIC.fullmatch(text):
        raise NotArithmetic(f"{text[:LONGEST]!r} is not arithmetic, or too long")
    try:
        tree = ast.parse(" ".join(_NUMBER.sub(_literal, text).split()), mode="eval")
    except SyntaxError as error:
        raise NotArithmetic(f"{text!r} is not arithmetic: {error.msg}") from None
    return _operand(tree.body, steps)


def read_number(text: str) -> Number:
    """Parse `1,200`, `-3` or `0.5`; return an int if the value is integral."""
    value = float(text.replace(",", ""))
    return int(value) if value.is_integer() else value


def _literal(found: re.Match[str]) -> str:
    """Return a number, or a percentage as its share, as Python writes it."""
    value = read_number(found[1])
    return f" {read_number(str(value / 100)) if found[2] else value} "


def _operand(node: ast.expr, steps: list[PlannedCall]) -> Operand:
    """Append the calls of a part of an expression, which is never evaluated; return its operand."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _operand(inner, steps)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            operand = _operand(inner, steps)
            return (
                _call("subtract", 0, operand, steps)
                if isinstance(operand, ResultReference)
                else -operand
            )
        case ast.BinOp(op=sign, left=left, right=right) if type(sign) in _OPERATIONS:
            first = _operand(left, steps)
            return _call(_OPERATIONS[type(sign)], first, _operand(right, steps), steps)
    raise NotArithmetic("an expression has numbers, + - * / and parentheses alone")


def _call(operation: str, a: Operand, b: Operand, steps: list[PlannedCall]) -> ResultReference:
    steps.append(PlannedCall("calculator", {"op": operation, "a": a, "b": b}))
    return ResultReference(len(steps) - 1)


_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
_FINAL = re.compile(r"####\s*\$?(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `steps` are the calculator calls of its annotations, empty if unusable; `split`
    is the file's own label, where it has one."""

    question: str
    answer: Number
    steps: tuple[PlannedCall, ...]
    split: str | None = None


class _Line(BaseModel):
    question: str
    answer: str
    split: str | None = None


def read_problems(path: Path | str) -> tuple[Problem, ...]:
    """Return the problems of a file or a dataset's id, each question once for each split.

    Raises DataError, and UnusableTask for a dataset that cannot be loaded.
    """
    if isinstance(path, str):
        return _of_dataset(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return _read(path.absolute(), stat.st_mtime_ns, stat.st_size)


def normalized(question: str) -> str:
    """Return a question with normalized white space; equal results mean equal questions."""
    return " ".join(question.split())


@lru_cache(maxsize=4)
def _read(path: Path, *_state: int) -> tuple[Problem, ...]:
    """Parse a file; `_state` (modification time, size) is only part of the cache key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    return _problems(path, text.split("\n"))


@lru_cache(maxsize=2)
def _of_dataset(named: str) -> tuple[Problem, ...]:
    return _problems(named, [json.dumps(row, default=str) for row in read_rows(named)])


def _problems(path: Path | str, lines: Sequence[str]) -> tuple[Problem, ...]:
    problems: dict[str, tuple[int, Problem]] = {}
    different: dict[tuple[str, str | None], Problem] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problem = _problem(f"{path}, line {number}", line)
            question = normalized(problem.question)
            first, known = problems.setdefault(question, (number, problem))
            different.setdefault((question, problem.split), problem)
            if known.answer != problem.answer:
                raise DataError(
                    f"{path}, line {number}: the answer is {problem.answer} but line {first} asks "
                    f"the same question with the answer {known.answer}: remove one of them"
                )
    return tuple(different.values())


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({error}): give a readable UTF-8 JSONL file")


def _problem(where: str, line: str) -> Problem:
    try:
        raw = validated_json(_Line, line)
    except ValidationError as error:
        raise DataError(
            f"{where} is {_shown(line)}: {place_and_text(error)}: write one "
            'JSON object with the strings "question" and "answer"'
        ) from None
    if not raw.question.strip():
        raise DataError(f"{where}: question is {raw.question!r}, without words: ask something")
    answer = _final_number(where, raw.answer)
    return Problem(raw.question, answer, _steps(raw.answer), raw.split)


def _final_number(where: str, answer: str) -> Number:
    match = _FINAL.search(answer)
    if match is None:
        raise DataError(
            f"{where}: answer ends in {_shown(answer[-40:])}: it must end in a number after four "
            "hashes, for example #### 72"
        )
    if abs(float(match[1].replace(",", ""))) > LARGEST:
        raise DataError(
            f"{where}: the final number is {_shown(match[1])} but numbers go up to {LARGEST}: "
            "remove the row"
        )
    return read_number(match[1])


def _steps(answer: str) -> tuple[PlannedCall, ...]:
    """Return the annotations as working calculator calls, or none if one of them fails."""
    steps: list[PlannedCall] = []
    try:
        for expression in _ANNOTATION.findall(answer):
            append_steps(expression, steps)
        _try(steps)
    except (NotArithmetic, ToolError):
        return ()
    return tuple(steps)


def _try(steps: list[PlannedCall]) -> None:
    """Run the calls as a session would, rounding included; raise ToolError on a failure."""
    results: list[Number] = []
    for step in steps:
        arguments = step.call(results).arguments
        if max(abs(arguments["a"]), abs(arguments["b"])) > LARGEST:
            raise ToolError("bad_value", f"numbers go up to {LARGEST}")
        shown = as_number(format_number(calculate(**arguments)))
        assert shown is not None
        results.append(shown)


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:57]}...")


TOLERANCE = 1e-6


class Gsm8kSession(Session):
    """A problem with a calculator."""

    solved = False

    @tool
    def calculator(self, op: Operation, a: Bounded, b: Bounded) -> str:
        """Computes a op b."""
        return format_number(calculate(op, a, b))

    def reply(self, text: str) -> Reply:
        reply = judged(text, lambda value: is_right(value, self.row["answer"]))
        self.solved = reply.error is None
        return reply


class Gsm8kTask(Task):
    """Episodes are rows of the file in order; every `heldout_every`-th row is held out, or those
    that their column `split` names.

    Rows with the same words count as one row, so no question is in both splits. Episode `index` of
    a split is row `index` modulo the number of rows: indices beyond the last row wrap around.
    """

    name = "gsm8k"
    session_class = Gsm8kSession

    def load(self) -> None:
        """Read the file; raises DataError if it is not usable."""
        path, every = self.settings.path, self.settings.heldout_every
        if path is None:
            raise DataError("data.path is not set: name the JSONL file or dataset of the problems")
        problems = read_problems(path)
        if len(problems) < every and not any(one.split for one in problems):
            raise DataError(
                f"{path} has {len(problems)} different questions but data.heldout_every is "
                f"{every}, so none is held out: give more rows or lower data.heldout_every"
            )
        self._problems = {normalized(problem.question): problem for problem in problems}
        self._splits = held_out([_row(one) for one in problems], every, self.identity, path)

    def rows(self, split: Split) -> list[Row]:
        return self._splits[split]

    def identity(self, row: Row) -> str:
        return normalized(row["question"])

    def prompt(self, row: Row) -> str:
        return str(row["question"])

    @reward
    def solved(self, transcript: Transcript) -> float:
        """1 for the right answer."""
        return float(cast(Gsm8kSession, transcript.session).solved)

    def verified_answer(self, episode: Episode) -> str:
        return format_number(episode.payload["answer"])

    def expert(self, messages: list[Message]) -> str:
        """Return the row's next calculator call, or its answer if none is left.

        Rows without usable annotations are answered at once, and so is any row in the last turn.
        """
        problem = self._problem(messages)
        results = plan_results(problem.steps, messages)
        turns = sum(message["role"] == "assistant" for message in messages)
        if len(results) < len(problem.steps) and turns + 1 < self.settings.max_turns:
            return next_call(problem.steps, results)
        return f"Answer: {format_number(problem.answer)}"

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        wrong = corrupt(self.expert(messages), messages, rng)
        value = read_answer(wrong)
        if value is not None and is_right(value, self._problem(messages).answer):
            return GIVE_UP
        return wrong

    def _problem(self, messages: list[Message]) -> Problem:
        question = question_of(messages)
        problem = self._problems.get(normalized(question))
        if problem is None:
            raise ValueError(
                f"{question[:60]!r} is not a question of this file: ask one from `episode`"
            )
        return problem


def _row(problem: Problem) -> Row:
    row = {"question": problem.question, "answer": problem.answer}
    return row if problem.split is None else {**row, COLUMN: problem.split}


def is_right(value: float, answer: Number) -> bool:
    """Compare with a tolerance of 1e-6 relative to the answer, absolute for answers below 1."""
    return abs(value - answer) <= TOLERANCE * max(1.0, abs(answer))
