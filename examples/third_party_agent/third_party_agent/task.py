"""The largest of three numbers; how the agent comes to its answer is up to it."""

import random
import re

from composer_mesh import Episode, Message, Row, Task, Transcript, reward


class Largest(Task):
    """A question and a number."""

    name = "largest"

    def generate(self, rng: random.Random) -> Row:
        a, b, c = rng.sample(range(100), 3)
        return {"question": f"Largest of {a}, {b}, {c}?", "answer": str(max(a, b, c))}

    def prompt(self, row: Row) -> str:
        return row["question"]

    @reward
    def correct(self, transcript: Transcript) -> float:
        """1 for the right number."""
        return float(transcript.answer.strip() == transcript.row["answer"])

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
