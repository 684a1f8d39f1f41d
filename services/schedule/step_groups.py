"""The groups that a step takes, and which of them it trains. Pure.

    groups in order of entry --> kept until there are `prompts_per_step`
                             +-> dropped: equal rewards, or too old (dynamic sampling only)

A step stops at `groups_per_step` groups, however few of them it has kept, and trains on those.
Which groups it takes depends only on their contents, so a resumed run takes the same ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.schedule.step_builder import Group


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
        oldest = self.step - self.config.max_lag
        return equal_rewards(group.traces) or any(_is_older(one, oldest) for one in group.traces)


def _is_older(trace: Trace, version: int) -> bool:
    return any(one < version for one in trace.versions())
