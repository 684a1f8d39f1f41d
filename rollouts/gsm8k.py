"""Math word problems from a GSM8K-format JSONL: a calculator and a numeric answer check.

The expert turns a problem's own annotations into calculator calls. `gsm8k_rows` reads the file.
"""

import random
from pathlib import Path

from composer_mesh.configs.schema import DataConfig, EnvironmentConfig
from composer_mesh.rollouts import mistakes
from composer_mesh.rollouts.gsm8k_rows import DataError, Row, normalized, read_rows
from composer_mesh.rollouts.plans import next_call, plan_results, question_of
from composer_mesh.rollouts.session import ToolSession, read_answer
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tools import Number, calculator, format_number
from composer_mesh.rollouts.traces import Message, Split

TOLERANCE = 1e-6


class Gsm8kTask:
    """Episodes are rows of the file in order; every `heldout_every`-th row is held out.

    Rows with the same words count as one row, so no question is in both splits. Episode `index` of
    a split is row `index` modulo the number of rows: indices beyond the last row wrap around.
    """

    name = "gsm8k"

    def __init__(
        self, path: Path, heldout_every: int, max_turns: int = 10, penalty: float = 0.0
    ) -> None:
        rows = read_rows(path)
        if len(rows) < heldout_every:
            raise DataError(
                f"{path} has {len(rows)} different questions but data.heldout_every is "
                f"{heldout_every}, so none is held out: give more rows or lower data.heldout_every"
            )
        self._max_turns, self._penalty = max_turns, penalty
        self._rows = {normalized(row.question): row for row in rows}
        last = heldout_every - 1
        self._splits: dict[Split, list[Row]] = {
            "train": [row for i, row in enumerate(rows) if i % heldout_every != last],
            "heldout": [row for i, row in enumerate(rows) if i % heldout_every == last],
        }
        self.tools = [calculator().schema()]

    @classmethod
    def from_config(cls, data: DataConfig, environment: EnvironmentConfig) -> "Gsm8kTask":
        """Create the configured task; raise DataError if the file is not usable."""
        if data.path is None:
            raise DataError("data.path is not set: name the JSONL file that holds the problems")
        return cls(
            data.path, data.heldout_every, environment.max_turns, environment.tool_error_penalty
        )

    def rows(self, split: Split) -> int:
        """Return the number of different questions in a split."""
        return len(self._splits[split])

    def episode(self, split: Split, index: int) -> Episode:
        rows = self._splits[split]
        row = rows[index % len(rows)]
        return Episode(self.name, split, index, {"question": row.question, "answer": row.answer})

    def session(self, episode: Episode) -> ToolSession:
        answer = episode.payload["answer"]
        opening = [{"role": "user", "content": episode.payload["question"]}]
        tools = {"calculator": calculator()}
        return ToolSession(
            opening, tools, lambda value: is_right(value, answer), self._max_turns, self._penalty
        )

    def answer(self, episode: Episode) -> str:
        return format_number(episode.payload["answer"])

    def expert(self, messages: list[Message]) -> str:
        """Return the row's next calculator call, or its answer if none is left.

        Rows without usable annotations are answered at once, and so is any row in the last turn.
        """
        row = self._row(messages)
        results = plan_results(row.steps, messages)
        turns = sum(message["role"] == "assistant" for message in messages)
        if len(results) < len(row.steps) and turns + 1 < self._max_turns:
            return next_call(row.steps, results)
        return f"Answer: {format_number(row.answer)}"

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        wrong = mistakes.corrupt(self.expert(messages), messages, rng)
        value = read_answer(wrong)
        if value is not None and is_right(value, self._row(messages).answer):
            return mistakes.GIVE_UP
        return wrong

    def _row(self, messages: list[Message]) -> Row:
        question = question_of(messages)
        row = self._rows.get(normalized(question))
        if row is None:
            raise ValueError(
                f"{question[:60]!r} is not a question of this file: ask one from `episode`"
            )
        return row


def is_right(value: float, answer: Number) -> bool:
    """Compare with a tolerance of 1e-6 relative to the answer, absolute for answers below 1."""
    return abs(value - answer) <= TOLERANCE * max(1.0, abs(answer))
