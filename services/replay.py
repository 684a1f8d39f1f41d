"""The replay channel's round trip: states of finished groups go out, preference pairs come back.

Choosing states and counting votes are pure rules elsewhere; this file asks and collects.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.rollouts.pairs import (
    Decision,
    PreferencePair,
    StudentState,
    TeacherAnswer,
    decide,
)
from composer_mesh.rollouts.state_choice import select_states
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.ports import Teachers


@dataclass
class Replayed:
    """What asking about some groups came to."""

    pairs: list[PreferencePair] = field(default_factory=list)
    states: int = 0
    failures: int = 0
    usd: float = 0.0

    def __iadd__(self, other: "Replayed") -> "Replayed":
        self.pairs += other.pairs
        self.states += other.states
        self.failures += other.failures
        self.usd += other.usd
        return self


class Replay:
    """Asks about `states_per_step` states for each step's worth of groups."""

    def __init__(
        self, teachers: Teachers, config: ReplayConfig, prompts_per_step: int, seed: int
    ) -> None:
        self._teachers, self._config, self._seed = teachers, config, seed
        self._prompts = prompts_per_step

    async def ask(self, group: Sequence[Trace]) -> Replayed:
        """The pairs of one group. Waits for its teachers, at most their timeout."""
        group_id = group[0].group_id
        rng = random.Random(f"{self._seed}:replay:{group_id}")
        states = select_states(group, self._share(group_id), rng)
        answered = await asyncio.gather(*(self._decide(state) for state in states))
        replayed = Replayed()
        for one in answered:
            replayed += one
        return replayed

    def _share(self, group_id: int) -> int:
        """The group's part of `states_per_step`; the parts of a step add up to it."""
        place, total = group_id % self._prompts, self._config.states_per_step
        return total * (place + 1) // self._prompts - total * place // self._prompts

    async def _decide(self, state: StudentState) -> Replayed:
        replies = await self._teachers.query(state.state, self._config.ask)
        decision: Decision = decide(state, replies, self._config.agreement_threshold)
        answers = [reply for reply in replies if isinstance(reply, TeacherAnswer)]
        return Replayed(
            [decision.pair] if decision.pair else [],
            states=1,
            failures=len(replies) - len(answers),
            usd=sum(answer.usd for answer in answers),
        )
