"""Rewards that are posted after their rollouts were trained on: they correct what was learned.

A late reward replaces the rollout's own. Its group's advantages are computed again, and each
rollout whose advantage has changed is trained once more with the difference, which is what the
first pass lacked. The loss corrects for the policy's age as it does for any old rollout. A reward
that comes before its group is trained just takes the place of the first one.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from composer_mesh.rollouts.batches import PolicySample, policy_sample
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.advantages import Advantages
from composer_mesh.services.replay.late_store import LateReward, LateStore

T = TypeVar("T")
Groups = list[list[Trace]]
SMALLEST_CHANGE = 1e-6


@dataclass
class Corrections:
    """What late rewards add to a step."""

    samples: list[PolicySample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """`rewards` used, rewards that are `expired`."""


class LateRewards:
    """Remembers trained groups for `max_age` steps. `report` is told of rewards without a use."""

    def __init__(
        self,
        store: LateStore,
        advantages: Advantages,
        max_age: int,
        report: Callable[[str], None],
    ) -> None:
        self._store, self._advantages = store, advantages
        self._max_age, self._report = max_age, report
        self._trained: dict[int, Groups] = {}
        self._patience: dict[int, int] = {}

    def corrections(self, step: int) -> Corrections:
        """The samples that posted rewards add to this step."""
        for old in [past for past in self._trained if step - past > self._max_age]:
            del self._trained[old]
        found = Corrections()
        touched: dict[int, list[LateReward]] = {}
        for reward in self._store.rewards():
            trained = self._step_of(reward.trace_id)
            if trained is not None:
                touched.setdefault(trained, []).append(reward)
            elif step - self._patience.setdefault(reward.place, step) > self._max_age:
                self._expire(reward, step, found)
        for trained, rewards in touched.items():
            found.samples += self._corrected(trained, rewards, step, found)
        return found

    def on_time(self, groups: Sequence[Sequence[Trace]], step: int) -> Groups:
        """The groups with the rewards that came before they are trained."""
        here = {trace.trace_id for group in groups for trace in group}
        posted = [reward for reward in self._store.rewards() if reward.trace_id in here]
        self._store.settle_rewards(posted, step, "trained")
        return _rewarded(groups, posted)

    def remember(self, step: int, groups: Groups) -> None:
        """These groups were trained in this step, now or before a restart."""
        self._trained[step] = groups

    def _corrected(
        self, trained: int, rewards: list[LateReward], step: int, found: Corrections
    ) -> list[PolicySample]:
        before = self._trained[trained]
        after = _rewarded(before, rewards)
        self._store.settle_rewards(rewards, step, "trained")
        found.counts["rewards"] += len(rewards)
        self._trained[trained] = after
        old, new = self._advantages(before), self._advantages(after)
        changes = zip(_flat(after), _flat(old), _flat(new), strict=True)
        return [
            policy_sample(trace, now - then)
            for trace, then, now in changes
            if trace.turns and abs(now - then) > SMALLEST_CHANGE
        ]

    def _step_of(self, trace_id: str) -> int | None:
        """The step that trained a rollout, None where none is remembered."""
        for step, groups in self._trained.items():
            if any(trace.trace_id == trace_id for group in groups for trace in group):
                return step
        return None

    def _expire(self, reward: LateReward, step: int, found: Corrections) -> None:
        self._store.settle_rewards([reward], step, "expired")
        found.counts["expired"] += 1
        self._report(
            f"the reward {reward.reward:g} for {reward.trace_id} has waited more than "
            f"{self._max_age} steps, and its rollout is none of those: raise late_rewards.max_age"
        )


def _rewarded(groups: Sequence[Sequence[Trace]], rewards: Sequence[LateReward]) -> Groups:
    """The groups with these rewards in place of their own; the last one for a rollout counts."""
    late = {reward.trace_id: reward.reward for reward in rewards}
    return [
        [dataclasses.replace(t, reward=late.get(t.trace_id, t.reward)) for t in group]
        for group in groups
    ]


def _flat(groups: Iterable[Iterable[T]]) -> list[T]:
    return [one for group in groups for one in group]
