"""The task of small_sums for the warm start of a built-in model: it knows prompts and answers."""

from __future__ import annotations

import random
import re

from composer_mesh import Message, Row
from composer_mesh.plugins.frameworks.verifiers.workflow import VerifiersTask


class SmallSumsTask(VerifiersTask):
    """Its prompts are those of the taskset."""

    def prompt(self, row: Row) -> str:
        return f"{row['task'] % 5 + 1} plus {row['task'] % 4 + 1}?"

    def expert(self, messages: list[Message]) -> str:
        a, b = re.findall(r"\d+", messages[-1]["content"])
        return str(int(a) + int(b))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return str(int(self.expert(messages)) + rng.choice((-1, 1)))
