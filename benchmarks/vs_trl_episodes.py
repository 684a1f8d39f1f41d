"""Plays many episodes of a run's task together, turn by turn, with any batch sampling function.

Both sides of `vs_trl` are judged by it, and TRL's rollouts are made by it. Inputs, the end of an
episode and the limits of a turn are as in `rollouts.episode`; tests compare the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.sync_session import SyncSession
from composer_mesh.tasks.task import Task

Sample = Callable[[list[list[int]]], list[list[int]]]
"""Answers a batch of contexts, each up to and including its stop token."""


@dataclass
class Played:
    """An episode's ids; `mask` is 1 at those that were sampled, from the first answer on."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False

    def add(self, ids: Sequence[int], sampled: bool) -> None:
        self.ids += ids
        self.mask += [int(sampled)] * len(ids)

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.ids


class Player:
    """Plays episodes of one task in lockstep; finished ones drop out."""

    def __init__(self, config: Config, task: Task, chat: ChatFormat) -> None:
        self._task, self._chat = task, chat
        self._context = config.policy.max_context

    def play(self, episodes: Sequence[Episode], sample: Sample) -> list[Played]:
        """Play every episode to its end."""
        sessions = [SyncSession(self._task, episode) for episode in episodes]
        played = [Played(self._chat.first_prompt(session.messages)) for session in sessions]
        live = list(range(len(episodes)))
        while live := [place for place in live if len(played[place].context) < self._context]:
            answers = sample([played[place].context for place in live])
            turns = zip(live, answers, strict=True)
            live = [p for p, answer in turns if self._turn(sessions[p], played[p], answer)]
        return played

    def _turn(self, session: SyncSession, played: Played, answer: list[int]) -> bool:
        """Apply one answer, up to the context limit; return whether the episode continues."""
        answer = answer[: self._context - len(played.context)]
        played.add(answer, sampled=True)
        step = session.step(self._chat.action_text(answer))
        if step.done:
            outcome = session.outcome()
            played.reward, played.success = outcome.reward, outcome.success
            return False
        played.add(self._chat.continuation(step.messages, answer), sampled=False)
        return True
