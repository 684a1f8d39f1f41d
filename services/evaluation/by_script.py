"""Evaluates a scripted policy: a task's own gold actions, or empty answers.

It says whether the task accepts what solves it and refuses what does not.
"""

from __future__ import annotations

from typing import Literal

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services.evaluation.in_process import InProcessEvaluation, Policy
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task

Script = Literal["gold", "empty"]
AT_ONCE = 8


class ScriptedEvaluation(InProcessEvaluation):
    """Plays held-out episodes by the task's gold actions, or by empty answers."""

    def __init__(self, config: Config, task: Task, store: Store, script: Script) -> None:
        super().__init__(config, task, store, 1, AT_ONCE)
        self._script = script

    async def _policy(self, episode: Episode, _name: str) -> Policy:
        actions: list[str] = []
        if self._script == "gold":
            task = self._task.of(episode.task)
            what = f"the gold actions of task {task.name!r}"
            actions = list(await self._run(self._calls(what, task.gold, episode.payload)))

        async def act(_running: RunningEpisode, turn: int) -> str:
            return actions[turn] if turn < len(actions) else ""

        return act
