"""From finished groups to one step's batch: advantages, hinted views, pairs.

Pure; the order of everything in a batch depends on its groups alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import (
    HintedSites,
    PolicySample,
    StepBatch,
    hinted_sites,
    pair_samples,
    policy_sample,
)
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tasks import Task
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.advantages import Advantages


@dataclass(frozen=True)
class Batcher:
    """Packs the three channels into steps."""

    config: Config
    task: Task
    chat: ChatFormat
    advantages: Advantages

    def batch(
        self, step: int, groups: Sequence[Sequence[Trace]], pairs: Sequence[PreferencePair]
    ) -> StepBatch:
        """The batch of a step. A channel that is off gets nothing."""
        samples = self._samples(groups)
        sdpo, context = self.config.sdpo, self.config.policy.max_context
        # Sample by sample over the groups, so that each prompt has its share of the views.
        spread = [trace for row in zip_longest(*groups) for trace in row if trace is not None]
        sites = HintedSites([], 0)
        if sdpo.on:
            limit = sdpo.max_sites_per_step
            sites = hinted_sites(spread, self.chat, self._answer, limit, context)
        packed = pair_samples(pairs, self.chat, context)
        return StepBatch(step, samples, sites.views, packed, sites.refused)

    def _answer(self, trace: Trace) -> str:
        return self.task.answer(self.task.episode(trace.split, trace.index))

    def _samples(self, groups: Sequence[Sequence[Trace]]) -> list[PolicySample]:
        found = zip(groups, self.advantages(groups), strict=True)
        return [
            policy_sample(trace, advantage)
            for group, advantages in found
            for trace, advantage in zip(group, advantages, strict=True)
            if trace.turns
        ]
