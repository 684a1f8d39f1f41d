"""An agentic load: groups of equal prompts, a common header, several turns per session.

Drives only the embedded engine; measures nothing.
"""

import random
from dataclasses import dataclass
from typing import Any

from generator_ways import CONTEXT, ROWS, Size, model_of

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

HEADER, QUESTION, ANSWER, OBSERVATION = 100, 24, 16, 20
"""Tokens: of tools and instructions, then of what differs; of each turn."""


@dataclass(frozen=True)
class Load:
    """Concurrent sessions: `groups` questions, each sampled `members` times, of several turns."""

    groups: int = 6
    members: int = 8
    turns: int = 4

    @property
    def tokens(self) -> int:
        return self.groups * self.members * self.turns * ANSWER


class Sessions:
    """An engine under that load, with or without prefix sharing."""

    def __init__(self, size: Size, *, sharing: bool) -> None:
        self._vocabulary = size.vocabulary
        self._engine = Engine(model_of(size), ROWS, CONTEXT, prefix_tokens=None if sharing else 0)

    def serve(self, load: Load, seed: int) -> None:
        """Run all turns of all sessions; each prompt is all before it and an observation."""
        rng, answered = random.Random(seed), list[GenerationResult]()
        header = self._ids(rng, HEADER)
        prompts: dict[str, list[int]] = {}
        for group in range(load.groups):
            prompt = header + self._ids(rng, QUESTION)
            for member in range(load.members):
                prompts[f"{group}-{member}"] = list(prompt)
        left = dict.fromkeys(prompts, load.turns)
        for name in prompts:
            self._ask(name, prompts[name], rng, answered)
        while left:
            self._engine.step()
            for result in answered:
                name = result.request_id
                prompts[name] += result.token_ids + self._ids(rng, OBSERVATION)
                left[name] -= 1
            finished, answered[:] = [result.request_id for result in answered], []
            for name in finished:
                if left[name]:
                    self._ask(name, prompts[name], rng, answered)
                else:
                    del left[name]

    def _ask(self, name: str, prompt: list[int], rng: random.Random, answered: list[Any]) -> None:
        request = GenerationRequest(name, list(prompt), ANSWER, 1.0, rng.randrange(1 << 40), [])
        self._engine.submit(request, answered.append)

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(2, self._vocabulary) for _ in range(count)]
