"""Samples and stores rollouts with one policy version, without a trainer.

As many groups are in flight as in a full run, whose window allows `max_lag` steps ahead. The groups
stay `finished`: a later `train --from-traces` uses them in order.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from composer_mesh.configs.schema import Config
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Sampled:
    """Totals of the rollouts sampled in `seconds`; `tokens` counts sampled ones only."""

    step: int
    rollouts: int
    tokens: int
    reward: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rollouts:,} rollouts, {self.tokens:,} tokens in {self.seconds:.1f} s, "
            f"{self.tokens_per_s:,.0f} tokens/s, mean reward {self.reward:.3f}"
        )


class RolloutsOnly:
    """Sampling loop of one event loop; `tell` is called with each step's worth of groups."""

    def __init__(
        self,
        config: Config,
        task: Task,
        rollouts: Rollouts,
        store: Store,
        tell: Callable[[Sampled], None],
    ) -> None:
        self._config, self._rollouts, self._tell = config, rollouts, tell
        self._groups = Groups(config, task, rollouts, store, None, None, {})
        self.done: list[Sampled] = []

    async def run(self) -> None:
        """Sample every group of the run. Waits for the last one; no task is left running."""
        try:
            await self._run()
        finally:
            await self._groups.close()
            await self._rollouts.close()

    @property
    def total(self) -> Sampled:
        """Totals over all steps."""
        rollouts = sum(one.rollouts for one in self.done)
        rewards = sum(one.reward * one.rollouts for one in self.done)
        return Sampled(
            len(self.done),
            rollouts,
            sum(one.tokens for one in self.done),
            rewards / rollouts if rollouts else 0.0,
            sum(one.seconds for one in self.done),
        )

    async def _run(self) -> None:
        schedule, steps = self._config.schedule, self._config.run.steps
        size, entered, now = schedule.prompts_per_step, 0, asyncio.get_running_loop().time
        for step in range(steps):
            began, limit = now(), min(steps, step + 1 + schedule.max_lag) * size
            self._groups.enter(range(entered, limit), 0)
            entered = limit
            groups = await self._groups.collect(size)
            sizes = [len(group.traces) for group in groups]
            self._rollouts.retries.check_step(step + 1, sizes, schedule.group_size)
            traces = [trace for group in groups for trace in group.traces]
            rewards = sum(trace.reward for trace in traces)
            mean = rewards / len(traces) if traces else 0.0
            tokens = sum(trace.action_tokens() for trace in traces)
            self.done.append(Sampled(step + 1, len(traces), tokens, mean, now() - began))
            self._tell(self.done[-1])
