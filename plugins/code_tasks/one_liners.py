"""The task "one_liners": write one line of Python that is asked for in words.

Small enough to be learned by a tiny policy on a CPU, with all that a coding task has: tools, boxes,
visible tests, hidden values, canaries and the monitor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from composer_mesh.plugins.code_tasks.expressions import (
    DIGITS,
    FIRST,
    INFIX,
    NAMES,
    Expression,
    expression_of,
)
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

MODULE, TESTS = "f.py", "test_f.py"
ASKED = f"Write f(a, b, c) in {MODULE}: "
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
        return f"{ASKED}{row['words']}."

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
        right = _write(_asked(messages).python())
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
        every = list(_mistakes(_asked(messages)))
        return every[0] if rng.random() < HABIT_SHARE else rng.choice(every)


def _mistakes(asked: Expression) -> Iterator[str]:
    """Yield wrong ways to write a line, the habitual one first."""
    right = asked.python()
    if asked.python(parentheses=False) != right:
        yield _write(asked.python(parentheses=False))
    if asked.then is not None:
        yield _write(asked.without_second().python())
    yield _write(asked.opposite().python())
    if ")" in right:
        yield _write(right.replace(")", "", 1))
    yield _call(right, "f")


def _asked(messages: Sequence[Message]) -> Expression:
    return expression_of(question_of(messages).removeprefix(ASKED).removesuffix("."))


def _write(line: str) -> str:
    return _call(line, MODULE)


def _call(line: str, path: str) -> str:
    return call_text("write_file", {"path": path, "content": f"{HEAD}return {line}\n"})


def _inputs(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(low, high + 1), len(NAMES)))


def _value(made: Expression, inputs: Sequence[int]) -> Any:
    return made.value(dict(zip(NAMES, inputs, strict=True)))
