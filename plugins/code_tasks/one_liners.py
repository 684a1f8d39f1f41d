"""The task "one_liners": write one line of Python that is described in words.

Small enough to be learned by a tiny policy on a CPU, with all that a coding task has: tools, boxes,
visible tests, hidden values, canaries and the monitor.

    the larger of a and 7, then times c    ->    max(a, 7) * c

Three names, digits, five first operations and four second ones: 6,300 expressions. Nothing is ever
evaluated as Python outside of a box.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.plugins.code_tasks.work import CodeWork
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.mistakes import calls_and_results
from composer_mesh.tasks.planned import question_of
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.sandbox import Sandbox

NAMES = "abc"
DIGITS = "23456789"
INFIX: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, y: x + y),
    "minus": ("-", lambda x, y: x - y),
    "times": ("*", lambda x, y: x * y),
    "modulo": ("%", lambda x, y: x % y),
}
CALLS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "larger": ("max", max),
    "smaller": ("min", min),
}
FIRST = ("plus", "minus", "times", *CALLS)
BINDING = ("times", "modulo")
"""Second operations before which an infix one needs its parentheses."""

_TERM = f"[{NAMES}{DIGITS}]"
_WORDS = re.compile(
    rf"(?:the (?P<call>{'|'.join(CALLS)}) of (?P<cx>{_TERM}) and (?P<cy>{_TERM})"
    rf"|(?P<x>{_TERM}) (?P<op>plus|minus|times) (?P<y>{_TERM}))"
    rf"(?:, then (?P<then>{'|'.join(INFIX)}) (?P<z>{_TERM}))?"
)


@dataclass(frozen=True)
class Expression:
    """`first` applied to x and y, then perhaps `then` to that and z."""

    first: str
    x: str
    y: str
    then: str | None = None
    z: str = ""

    @property
    def words(self) -> str:
        """The expression as the agent's prompt states it."""
        head = f"{self.x} {self.first} {self.y}"
        if self.first in CALLS:
            head = f"the {self.first} of {self.x} and {self.y}"
        return head if self.then is None else f"{head}, then {self.then} {self.z}"

    def python(self, parentheses: bool = True) -> str:
        """The expression in Python; without `parentheses` as one who forgets them writes it."""
        if self.first in CALLS:
            head = f"{CALLS[self.first][0]}({self.x}, {self.y})"
        else:
            head = f"{self.x} {INFIX[self.first][0]} {self.y}"
            if parentheses and self.then in BINDING:
                head = f"({head})"
        return head if self.then is None else f"{head} {INFIX[self.then][0]} {self.z}"

    def value(self, values: Mapping[str, int]) -> int:
        """The value for values of the names."""

        def of(term: str) -> int:
            return values[term] if term in NAMES else int(term)

        combine = (CALLS.get(self.first) or INFIX[self.first])[1]
        head = combine(of(self.x), of(self.y))
        return head if self.then is None else INFIX[self.then][1](head, of(self.z))

    def opposite(self) -> Expression:
        """Return the expression of one who takes one operation for its opposite."""
        pairs = {"plus": "minus", "minus": "plus", "larger": "smaller", "smaller": "larger"}
        return replace(self, first=pairs.get(self.first, "plus"))

    def without_second(self) -> Expression:
        """Return the expression of one who forgets the second operation."""
        return replace(self, then=None, z="")


def expression_of(words: str) -> Expression:
    """Return the expression that words ask for; raise ValueError for any others."""
    found = _WORDS.fullmatch(words)
    if found is None:
        raise ValueError(f"{words!r} asks for no expression of the task one_liners")
    x, y = found["x"] or found["cx"], found["y"] or found["cy"]
    return Expression(found["op"] or found["call"], x, y, found["then"], found["z"] or "")


MODULE, TESTS = "f.py", "test_f.py"
PROMPT = f"Write f(a, b, c) in {MODULE}: "
HEAD = "def f(a, b, c):\n    "
MISSING = f"{HEAD}raise NotImplementedError\n"
VISIBLE, HIDDEN = 3, 12
TAIL_SHARE = 0.7
HABIT_SHARE = 0.7


class OneLiners(CodeTask):
    """Episodes by seed. The words decide the split, so no expression is in both."""

    name = "one_liners"
    session_class = CodeWork

    def load(self) -> None:
        self.refuse_unknown_judge()
        if self.settings.path is not None:
            raise UnusableTask(
                f"data.path is {str(self.settings.path)!r}, but task {self.name!r} makes its own "
                'rows: remove it, or use task "code"'
            )

    async def check_sandbox(self, sandbox: Sandbox) -> None:
        """Its module is made up for each row, and no box has it."""

    def rows(self, split: Split) -> Sequence[Row] | None:
        return None

    def generate(self, rng: random.Random) -> Row:
        x = rng.choice(NAMES)
        y = rng.choice((NAMES + DIGITS).replace(x, ""))
        made = Expression(rng.choice(FIRST), x, y)
        if rng.random() < TAIL_SHARE:
            then = rng.choice(list(INFIX))
            z = rng.choice(DIGITS if then == "modulo" else NAMES + DIGITS)
            made = Expression(made.first, x, y, then, z)
        return {"words": made.words}

    def identity(self, row: Row) -> str:
        return str(row["words"])

    def prompt(self, row: Row) -> str:
        return f"{PROMPT}{row['words']}."

    def judged(self, row: Row) -> JudgedTask:
        """Return the tests and hidden values of a row, which its words alone decide."""
        made, rng = expression_of(row["words"]), random.Random(row["words"])
        shown = [_inputs(rng, 2, 9) for _ in range(VISIBLE)]
        hidden = [_inputs(rng, -20, 20) for _ in range(HIDDEN)]
        tests = "".join(
            f"\n\ndef test_{at}():\n    assert f{inputs} == {_value(made, inputs)}\n"
            for at, inputs in enumerate(shown, 1)
        )
        return self.shown(
            JudgedTask(
                name=str(row["words"]),
                files={MODULE: MISSING.encode(), TESTS: f"from f import f\n{tests}".encode()},
                sources=(MODULE,),
                targets=("f:f",),
                fail_to_pass=tuple(f"{TESTS}::test_{at}" for at in range(1, VISIBLE + 1)),
                pass_to_pass=(),
                cases=tuple(
                    HiddenCase("f:f", inputs, {}, {"returned": _value(made, inputs)})
                    for inputs in hidden
                ),
            )
        )

    def gold(self, row: Row) -> Sequence[str]:
        return [_write(expression_of(row["words"]).python()), call_text("submit", {})]

    def remarks(self) -> Sequence[str]:
        return [f"one-liners; flagged rollouts: {self.options.monitor}"]

    def verified_answer(self, episode: Episode) -> str:
        return expression_of(episode.payload["words"]).python()

    def expert(self, messages: list[Message]) -> str:
        """Write the line, run the tests, submit."""
        right = _write(_requested(messages).python())
        last = list(calls_and_results(messages))[-1:]
        call, result = last[0] if last else (None, "")
        if call == parse_action(right) and result == f"{MODULE} was written":
            return call_text("run_tests", {})
        if call is not None and call.name == "run_tests" and result.endswith(", 0 failed"):
            return call_text("submit", {})
        return right

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return a wrong line or a call that fails; in place of tests, work without them."""
        action = parse_action(self.expert(messages))
        if isinstance(action, ToolCall) and action.name != "write_file":
            wrong = {"files": ["tests.py"]}
            return call_text("run_tests", wrong if action.name == "submit" else {"files": [MODULE]})
        every = list(_mistakes(_requested(messages)))
        return every[0] if rng.random() < HABIT_SHARE else rng.choice(every)


def _mistakes(requested: Expression) -> Iterator[str]:
    """Yield wrong ways to write a line, the habitual one first."""
    right = requested.python()
    if requested.python(parentheses=False) != right:
        yield _write(requested.python(parentheses=False))
    if requested.then is not None:
        yield _write(requested.without_second().python())
    yield _write(requested.opposite().python())
    if ")" in right:
        yield _write(right.replace(")", "", 1))
    yield _call(right, "f")


def _requested(messages: Sequence[Message]) -> Expression:
    return expression_of(question_of(messages).removeprefix(PROMPT).removesuffix("."))


def _write(line: str) -> str:
    return _call(line, MODULE)


def _call(line: str, path: str) -> str:
    return call_text("write_file", {"path": path, "content": f"{HEAD}return {line}\n"})


def _inputs(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(low, high + 1), len(NAMES)))


def _value(made: Expression, inputs: Sequence[int]) -> Any:
    return made.value(dict(zip(NAMES, inputs, strict=True)))
