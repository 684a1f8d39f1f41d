"""Plays many episodes of a run's task together, turn by turn, with any batch sampling function.

Both sides of `vs_trl` are judged by it, and TRL's rollouts are made by it, with the rollouts that
this project offers to TRL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.frameworks.trl.rollouts import TaskRollouts
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.task import Task

Sample = Callable[[list[list[int]]], list[list[int]]]
"""Answers a batch of contexts, each up to and including its stop token."""


@dataclass(frozen=True)
class Played:
    """An episode's ids; `mask` is 1 at those that were sampled, from the first answer on."""

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    reward: float
    success: bool


class Player:
    """Plays episodes of one task in lockstep; finished ones drop out."""

    def __init__(self, config: Config, task: Task, chat: ChatFormat) -> None:
        self._rollouts = TaskRollouts(task, chat.tokenizer, chat=chat)
        self._context = config.policy.max_context

    def play(self, episodes: Sequence[Episode], sample: Sample) -> list[Played]:
        """Play every episode to its end."""
        traces = self._rollouts.play(
            episodes, lambda contexts: (sample(contexts), None), self._context
        )
        found = []
        for trace in traces:
            first, ids = len(trace.turns[0].context_ids), trace.token_ids()
            mask = list(map(int, trace.action_mask()[first:]))
            found.append(Played(ids[:first], ids[first:], mask, trace.reward, trace.success))
        return found
