"""Builds the batch of a step, writes its manifest, and rebuilds the same batch from the manifest.

    stored groups, pairs, late rewards  -- compose -->  PlannedStep + manifest
    stored groups, pairs, manifest      -- again ---->  the same PlannedStep

Pure: no I/O and no waiting. The content of a manifest is defined in `step_manifest`; the controller
decides when it is written and what is trained from it.

The groups that a step takes, and which of them it trains. Pure.

    groups in order of entry --> kept until there are `prompts_per_step`
                             +-> dropped: equal rewards, or too old (dynamic sampling only)
                             +-> passed over: unfinished, `carried_groups` at most

A step stops at `groups_per_step` groups, however few of them it has kept, and trains on those. Its
manifest names them. Without carried groups they depend only on the contents of groups.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.curriculum import GroupResult
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.replay.late_rewards import Corrections, LateRewards, rewarded
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.schedule.metrics import step_metrics
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import WrittenHints
from composer_mesh.services.steps.step_manifest import (
    StepManifest,
    TakenFigures,
    figures_of,
    replay_outcome_of,
)

Traces = list[list[Trace]]


@dataclass(frozen=True)
class Group:
    """One prompt's stored samples, with the hint writer's texts for them."""

    group_id: int
    traces: list[Trace]
    worded: WrittenHints


@dataclass(frozen=True)
class PlannedStep:
    """A step before it is trained: its batch, and the other inputs of its metrics."""

    batch: StepBatch
    traces: list[Trace]
    taken: TakenPairs | None
    corrections: Corrections
    figures: Mapping[str, float] = field(default_factory=dict)

    def metrics(self, trained: dict[str, Any]) -> dict[str, Any]:
        """Return the step's metrics, except its durations."""
        found = step_metrics(self.batch, self.traces, self.taken, self.corrections, trained)
        return found | dict(self.figures)


@dataclass(frozen=True)
class StepBuilder:
    """Builds steps from groups. `late` is None where late rewards are off.

    Steps must be built in order, because late rewards correct earlier steps. A step may be built in
    a thread: only one at a time, and with a `late` whose reports may come from there.
    """

    batcher: Batcher
    late: LateRewards | None = None

    def compose(
        self,
        step: int,
        groups: Sequence[Group],
        taken: TakenPairs | None,
        figures: Mapping[str, float],
        dropped: Sequence[int] = (),
        results: Sequence[GroupResult] = (),
    ) -> tuple[PlannedStep, StepManifest]:
        """Build a step from what is available now; return it with its manifest.

        `dropped` are the groups that the step has taken without training them, `results` what all
        that it has taken have measured.
        """
        by_prompt, corrections = self._with_rewards(step, [group.traces for group in groups])
        pairs = taken.pairs if taken else []
        batch = self.batcher.batch(
            step,
            by_prompt,
            pairs,
            sum_worded(groups),
            corrections.samples,
            _agreement(taken),
        )
        manifest = StepManifest(
            step,
            tuple(group.group_id for group in groups),
            tuple(pair.pair_id for pair in pairs),
            _figures(taken),
            corrections.rewards,
            tuple((trace.trace_id, change) for trace, change in corrections.changes),
            dict(corrections.counts),
            self._patience(corrections),
            dict(figures),
            tuple(dropped),
            tuple(results),
        )
        return PlannedStep(batch, _flat(by_prompt), taken, corrections, figures), manifest

    def again(
        self, manifest: StepManifest, groups: Sequence[Group], pairs: Sequence[PreferencePair]
    ) -> PlannedStep:
        """Rebuild a step from its manifest, once the steps before it were rebuilt or remembered."""
        by_prompt = rewarded([group.traces for group in groups], manifest.rewards)
        changes = [(self._trace(name), change) for name, change in manifest.corrections]
        corrections = Corrections(changes, Counter(manifest.late), manifest.rewards)
        if self.late is not None:
            self.late.repeat(manifest.step, by_prompt, manifest.rewards, manifest.patience)
        taken = _taken(manifest.taken, pairs)
        batch = self.batcher.batch(
            manifest.step,
            by_prompt,
            pairs,
            sum_worded(groups),
            corrections.samples,
            _agreement(taken),
        )
        return PlannedStep(batch, _flat(by_prompt), taken, corrections, manifest.figures)

    def remember(self, manifest: StepManifest, groups: Sequence[Group]) -> None:
        """Register a step that is not recomputed, so that its late rewards can be applied."""
        if self.late is not None:
            by_prompt = rewarded([group.traces for group in groups], manifest.rewards)
            self.late.repeat(manifest.step, by_prompt, manifest.rewards, manifest.patience)

    def _with_rewards(self, step: int, groups: Traces) -> tuple[Traces, Corrections]:
        if self.late is None:
            return groups, Corrections()
        corrections = self.late.corrections(step)
        groups = self.late.on_time(groups, corrections)
        self.late.remember(step, groups)
        return groups, corrections

    def _patience(self, corrections: Corrections) -> dict[int, int]:
        if self.late is None:
            return {}
        settled = {reward.place for reward, _ in corrections.settled}
        return {place: step for place, step in self.late.patience.items() if place not in settled}

    def _trace(self, trace_id: str) -> Trace:
        found = None if self.late is None else self.late.trace(trace_id)
        if found is None:
            raise KeyError(f"no remembered step has the rollout {trace_id} that it corrects")
        return found


def sum_worded(groups: Sequence[Group]) -> WrittenHints:
    """Merge the hint texts of all groups."""
    total = WrittenHints()
    for group in groups:
        total += group.worded
    return total


def _figures(taken: TakenPairs | None) -> TakenFigures | None:
    if taken is None:
        return None
    return TakenFigures(
        figures_of(taken.replay_outcome),
        taken.expired,
        taken.waiting,
        taken.usd_total,
        taken.saved_usd,
        taken.asked,
    )


def _taken(figures: TakenFigures | None, pairs: Sequence[PreferencePair]) -> TakenPairs | None:
    if figures is None:
        return None
    return TakenPairs(
        list(pairs),
        replay_outcome_of(figures.replay_outcome),
        figures.expired,
        figures.waiting,
        figures.usd_total,
        figures.saved_usd,
        figures.asked,
    )


def _agreement(taken: TakenPairs | None) -> float | None:
    return None if taken is None else taken.replay_outcome.agreement


def _flat(groups: Traces) -> list[Trace]:
    return [trace for group in groups for trace in group]


@dataclass
class StepGroups:
    """The groups that step `step` has taken so far, in order of entry."""

    config: ScheduleConfig
    step: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Number of groups that the step takes next; 0 once it has all of its groups."""
        missing = self.config.prompts_per_step - len(self.kept)
        return min(missing, self.config.groups_per_step - self.taken)

    @property
    def taken(self) -> int:
        """Number of groups that the step has taken."""
        return len(self.kept) + len(self.dropped)

    @property
    def all(self) -> list[Group]:
        """The groups that the step has taken."""
        return [*self.kept, *self.dropped]

    @property
    def sizes(self) -> list[int]:
        """Number of rollouts of each group."""
        return [len(group.traces) for group in self.all]

    @property
    def missing(self) -> int:
        """Number of groups that the step trains less than `prompts_per_step`."""
        return self.config.prompts_per_step - len(self.kept)

    def take(self, groups: Iterable[Group]) -> None:
        """Take the next groups in order of entry."""
        for group in groups:
            (self.dropped if self._drops(group) else self.kept).append(group)

    def figures(self) -> dict[str, float]:
        """Return the metrics of dynamic sampling; none where it is off."""
        if not self.config.dynamic_sampling:
            return {}
        rewards = [trace.reward for group in self.all for trace in group.traces]
        return {
            "rollouts/dropped_groups": len(self.dropped),
            "rollouts/missing_groups": self.missing,
            "rollouts/sampled": len(rewards),
            "reward/sampled": sum(rewards) / len(rewards) if rewards else 0.0,
        }

    def shortage(self) -> str:
        """Return a sentence about the groups that are missing in the finished step."""
        schedule = self.config
        return (
            f"step {self.step + 1} trains {len(self.kept)} of {schedule.prompts_per_step} groups: "
            f"it has taken {self.taken}, and the rewards of the others are all equal; raise "
            f"schedule.oversampling above {schedule.oversampling:g}, or choose other prompts"
        )

    def _drops(self, group: Group) -> bool:
        if not self.config.dynamic_sampling:
            return False
        flat, oldest = equal_rewards(group.traces), self.step - self.config.max_lag
        if self.config.carried_groups:
            return flat
        return flat or any(_is_older(one, oldest) for one in group.traces)


def carried_text(step: int, passed: Sequence[int], carried: int) -> str:
    """Return a sentence about the groups that a step passes over for the first time."""
    return (
        f"step {step + 1} passes over unfinished groups ({', '.join(map(str, passed))}): each is "
        f"trained by the first step after it has finished; {carried} are carried now"
    )


def _is_older(trace: Trace, version: int) -> bool:
    return any(one < version for one in trace.versions())
