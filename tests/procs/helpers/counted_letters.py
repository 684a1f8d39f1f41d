"""A task of several turns, whose reward differs between answers of an untrained model."""

from __future__ import annotations

import random

from composer_mesh import Row, Session, Task, Transcript, reward

TURNS = 3


class Letters(Session):
    """Asks for more until there were some turns."""

    def start(self) -> None:
        self.said = 0

    def reply(self, text: str) -> str | None:
        self.said += 1
        return "Go on." if self.said < TURNS else None


class CountedLetters(Task):
    """An answer is worth more, the more different letters it has."""

    session_class = Letters

    def generate(self, rng: random.Random) -> Row:
        return {"question": f"Say {rng.randint(100, 999)}."}

    def prompt(self, row: Row) -> str:
        return str(row["question"])

    @reward
    def letters(self, transcript: Transcript) -> float:
        return len(set(transcript.answer)) / 100
