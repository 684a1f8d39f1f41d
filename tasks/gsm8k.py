"""Math word problems from a GSM8K-format JSONL: a calculator and a numeric answer check.

The expert turns a problem's own annotations into calculator calls. `gsm8k_rows` reads the file.
"""

import random
from typing import cast

from composer_mesh.rollouts.consensus import read_answer
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.gsm8k_rows import DataError, Problem, normalized, read_problems
from composer_mesh.tasks.mistakes import GIVE_UP, corrupt
from composer_mesh.tasks.numbers import (
    Bounded,
    Number,
    Operation,
    calculate,
    format_number,
    judged,
)
from composer_mesh.tasks.planned import next_call, plan_results, question_of
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import COLUMN, Row, held_out
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import tool

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
