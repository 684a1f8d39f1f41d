"""Reader of GSM8K-format JSONL: a question, worked annotations and a final number in each line.

A file is parsed once per process as long as it does not change.

Parser that turns written arithmetic into a chain of binary calculator calls.

`(3+4)*2` becomes two steps, the second of which refers to the result of the first. The parser does
not evaluate expressions; the calculator tool does.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ValidationError

from composer_mesh.configs.validation import place_and_text, validated_json
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.mistakes import as_number
from composer_mesh.tasks.numbers import LARGEST, Number, calculate, format_number
from composer_mesh.tasks.planned import Reference, Step
from composer_mesh.tasks.rows import read_rows

LONGEST = 200
_TOKEN = re.compile(r"\s*(\d+(?:,\d{3})*(?:\.\d*)?|\.\d+|[-+*/()%])", re.ASCII)
_OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}

Operand = Number | Reference


class NotArithmetic(ValueError):
    """The text contains anything but numbers, `+ - * / %` and parentheses."""


def append_steps(text: str, steps: list[Step]) -> Operand:
    """Append the calls that compute `text` to `steps`; return the operand that holds the result.

    Raises NotArithmetic, possibly after some steps were appended.
    """
    parser = _Parser(_tokens(text), steps)
    value = parser.sum()
    if parser.rest:
        raise NotArithmetic(f"{text!r} goes on after its end, at {parser.rest[-1]!r}")
    return value


def read_number(text: str) -> Number:
    """Parse `1,200`, `-3` or `0.5`; return an int if the value is integral."""
    value = float(text.replace(",", ""))
    return int(value) if value.is_integer() else value


def _tokens(text: str) -> list[str]:
    """Return the tokens of the text in reverse order."""
    if len(text) > LONGEST:
        raise NotArithmetic(f"{len(text)} characters are too many: at most {LONGEST} are read")
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotArithmetic(f"{text!r} holds {text[position]!r}, which is not arithmetic")
        tokens.append(match[1])
        position = match.end()
    return tokens[::-1]


@dataclass
class _Parser:
    """Recursive-descent parser: a sum of products of factors, left-associative."""

    rest: list[str]
    steps: list[Step] = field(default_factory=list)

    def sum(self) -> Operand:
        value = self._product()
        while self._next() in ("+", "-"):
            value = self._call(self.rest.pop(), value, self._product())
        return value

    def _product(self) -> Operand:
        value = self._factor()
        while self._next() in ("*", "/"):
            value = self._call(self.rest.pop(), value, self._factor())
        return value

    def _factor(self) -> Operand:
        token = self._take()
        if token == "-":
            return self._negative(self._factor())
        if token == "+":
            return self._factor()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise NotArithmetic("a parenthesis is not closed")
            return value
        if token in "*/)%":
            raise NotArithmetic(f"{token!r} stands where a number should")
        return self._percent(read_number(token))

    def _percent(self, value: Number) -> Number:
        if self._next() != "%":
            return value
        self.rest.pop()
        return read_number(str(value / 100))

    def _negative(self, value: Operand) -> Operand:
        return self._call("-", 0, value) if isinstance(value, Reference) else -value

    def _call(self, sign: str, a: Operand, b: Operand) -> Reference:
        self.steps.append(Step("calculator", {"op": _OPERATIONS[sign], "a": a, "b": b}))
        return Reference(len(self.steps) - 1)

    def _next(self) -> str:
        return self.rest[-1] if self.rest else ""

    def _take(self) -> str:
        if not self.rest:
            raise NotArithmetic("a number is missing at the end")
        return self.rest.pop()


_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
_FINAL = re.compile(r"####\s*\$?(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*$", re.ASCII)


class DataError(ValueError):
    """A problem file cannot be used; the message names the line, the value and the repair."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `steps` are the calculator calls of its annotations, empty if unusable; `split`
    is the file's own label, where it has one."""

    question: str
    answer: Number
    steps: tuple[Step, ...]
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


def _steps(answer: str) -> tuple[Step, ...]:
    """Return the annotations as working calculator calls, or none if one of them fails."""
    steps: list[Step] = []
    try:
        for expression in _ANNOTATION.findall(answer):
            append_steps(expression, steps)
        _try(steps)
    except (NotArithmetic, ToolError):
        return ()
    return tuple(steps)


def _try(steps: list[Step]) -> None:
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
