"""Many episodes of a run's task at once, turn by turn, with any function that samples a batch.

Both sides of `vs_trl` are judged by it, and TRL's rollouts are made by it. What is read, when an
episode ends and what a turn may take are as in `services.rollout`, which tests hold together with
it. Nothing here knows a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode, Session, Task

Sample = Callable[[list[list[int]]], list[list[int]]]
"""Answers to a batch of contexts, each up to and with its stop token."""


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
    """Plays episodes of one task in step with each other; those that have ended drop out."""

    def __init__(self, config: Config, task: Task, chat: ChatFormat) -> None:
        self._task, self._chat = task, chat
        self._room = config.policy.max_context - config.generator.max_new_tokens

    def play(self, episodes: Sequence[Episode], sample: Sample) -> list[Played]:
        """Every episode to its end."""
        sessions = [self._task.session(episode) for episode in episodes]
        played = [Played(self._chat.first_prompt(session.messages)) for session in sessions]
        live = list(range(len(episodes)))
        while live := [place for place in live if len(played[place].context) <= self._room]:
            answers = sample([played[place].context for place in live])
            turns = zip(live, answers, strict=True)
            live = [p for p, answer in turns if self._turn(sessions[p], played[p], answer)]
        return played

    def _turn(self, session: Session, played: Played, answer: list[int]) -> bool:
        """Take one answer; whether the episode goes on."""
        played.add(answer, sampled=True)
        step = session.step(self._chat.action_text(answer))
        if step.done:
            played.reward, played.success = step.reward, step.success
            return False
        closed = bool(answer) and answer[-1] == self._chat.stop_id
        played.add(self._chat.continuation(step.messages, closed), sampled=False)
        return True
