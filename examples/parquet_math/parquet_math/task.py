"""A question, one answer, and a reward that compares both."""

import random
import re

from composer_mesh import Episode, Message, Reply, Row, Session, Task, ToolError, Transcript, reward


class Answer(Session):
    """The agent answers once."""

    def reply(self, text: str) -> Reply:
        if text.strip() == self.row["answer"]:
            return Reply()
        facts = {"answer": text.strip()[:20]}
        return Reply(error=ToolError("wrong_result", "wrong", facts))


class ParquetMath(Task):
    """Rows with a question and an answer, from data.path."""

    name = "parquet_math"
    session_class = Answer
    hint_templates = {"wrong_result": "{answer} is not the largest of them."}

    def prompt(self, row: Row) -> str:
        return row["question"]

    @reward
    def correct(self, transcript: Transcript) -> float:
        """1 for the right answer."""
        return float(transcript.answer.strip() == transcript.row["answer"])

    @reward(weight=0.1)
    def a_number(self, transcript: Transcript) -> float:
        """1 for any number, right or wrong."""
        return float(transcript.answer.strip().lstrip("-").isdecimal())

    def verified_answer(self, episode: Episode) -> str:
        return episode.payload["answer"]

    def expert(self, messages: list[Message]) -> str:
        return str(max(numbers(messages)))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        smallest, middle, _ = sorted(numbers(messages))
        return str(middle if rng.random() < 0.85 else smallest)


def numbers(messages: list[Message]) -> list[int]:
    """The numbers of the question."""
    return [int(one) for one in re.findall(r"\d+", messages[0]["content"])]
