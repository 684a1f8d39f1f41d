"""Sums of two numbers; how the agent comes to its answer is up to it."""

import random

from composer_mesh import Episode, Message, Row, Task, Transcript, reward


class Sums(Task):
    """A question and a number."""

    name = "sums"

    def generate(self, rng: random.Random) -> Row:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        return {"question": f"{a} plus {b}?", "answer": str(a + b)}

    def prompt(self, row: Row) -> str:
        return row["question"]

    @reward
    def correct(self, transcript: Transcript) -> float:
        """1 for the right number."""
        return float(transcript.answer.strip() == transcript.row["answer"])

    def verified_answer(self, episode: Episode) -> str:
        return episode.payload["answer"]

    def expert(self, messages: list[Message]) -> str:
        a, _, b = messages[0]["content"].rstrip("?").split()
        return str(int(a) + int(b))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return str(int(self.expert(messages)) + rng.choice([-2, -1, 1, 2]))
