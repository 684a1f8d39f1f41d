"""Reader of GSM8K-format JSONL: a question, worked annotations and a final number in each line.

A file is parsed once per process as long as it does not change.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ValidationError

from composer_mesh.configs.validation import place_and_text, validated_json
from composer_mesh.tasks.arithmetic import NotArithmetic, append_steps, read_number
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.mistakes import as_number
from composer_mesh.tasks.numbers import LARGEST, Number, calculate, format_number
from composer_mesh.tasks.plans import Step

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


def read_problems(path: Path) -> tuple[Problem, ...]:
    """Return the file's problems, each question once for each split; raise DataError."""
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
    problems: dict[str, tuple[int, Problem]] = {}
    different: dict[tuple[str, str | None], Problem] = {}
    for number, line in enumerate(text.split("\n"), start=1):
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
