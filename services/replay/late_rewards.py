"""Late rewards, posted after their rollouts were trained on, are applied as corrections.

A late reward replaces the rollout's own. Its group's advantages are recomputed, and each rollout
whose advantage has changed is trained once more on the difference, which the first pass lacked. The
loss corrects for the policy's age as it does for any old rollout. A reward that arrives before its
group is trained just replaces the first one.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from composer_mesh.channels.policy import policy_sample
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import Advantage, PolicySample
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.advantages import Advantages, trajectory_advantages
from composer_mesh.services.store.rows import ItemState, LateReward

Groups = list[list[Trace]]
SMALLEST_CHANGE = 1e-6


@dataclass
class Corrections:
    """What late rewards add to a step. `rewards` are those that hold from this step on, by trace.

    `settled` is the new state of each posted reward, which takes effect once the step is planned.
    """

    changes: list[tuple[Trace, Advantage]] = field(default_factory=list)
    """Trajectories whose advantage changes, and by how much."""
    counts: Counter[str] = field(default_factory=Counter)
    """`rewards` used, and rewards that are `expired`."""
    rewards: dict[str, float] = field(default_factory=dict)
    settled: list[tuple[LateReward, ItemState]] = field(default_factory=list)

    @property
    def samples(self) -> list[PolicySample]:
        """The changes as samples to train on."""
        return [policy_sample(trace, change) for trace, change in self.changes]

    def use(self, rewards: Sequence[LateReward]) -> None:
        """Record rewards that this step uses; the last one for a rollout wins."""
        self.rewards |= {reward.trace_id: reward.reward for reward in rewards}
        self.settled += [(reward, ItemState.TRAINED) for reward in rewards]


class LateRewards:
    """Applies late rewards; remembers trained groups for `max_age` steps.

    `waiting` returns the posted rewards that no step has settled, in posting order. `report` is
    called for rewards that expire unused.
    """

    def __init__(
        self,
        waiting: Callable[[], Sequence[LateReward]],
        advantages: Advantages,
        max_age: int,
        report: Callable[[str], object],
    ) -> None:
        self._waiting, self._advantages = waiting, advantages
        self._max_age, self._report = max_age, report
        self._trained: dict[int, Groups] = {}
        self._patience: dict[int, int] = {}

    @property
    def patience(self) -> dict[int, int]:
        """The step at which each reward was first seen whose rollout is not remembered here."""
        return dict(self._patience)

    def corrections(self, step: int) -> Corrections:
        """Return the samples that posted rewards add to this step."""
        self._forget(step)
        found, waiting = Corrections(), self._waiting()
        places = {reward.place for reward in waiting}
        self._patience = {place: seen for place, seen in self._patience.items() if place in places}
        touched: dict[int, list[LateReward]] = {}
        for reward in waiting:
            trained = self._step_of(reward.trace_id)
            if trained is not None:
                touched.setdefault(trained, []).append(reward)
            elif step - self._patience.setdefault(reward.place, step) > self._max_age:
                self._expire(reward, found)
        for trained, rewards in touched.items():
            found.changes += self._corrected(trained, rewards, found)
        return found

    def on_time(self, groups: Sequence[Sequence[Trace]], found: Corrections) -> Groups:
        """Return the groups with the rewards that arrived before training, recording them in
        `found`."""
        here = {trace.trace_id for group in groups for trace in group}
        posted = [reward for reward in self._waiting() if reward.trace_id in here]
        found.use(posted)
        return rewarded(groups, found.rewards)

    def remember(self, step: int, groups: Groups) -> None:
        """Register the groups that are trained in this step."""
        self._trained[step] = groups

    def repeat(
        self,
        step: int,
        groups: Groups,
        rewards: Mapping[str, float],
        patience: Mapping[int, int],
    ) -> None:
        """Restore a step from before a restart: its groups, the rewards it used, and its
        `patience`."""
        self._forget(step)
        for past in self._trained:
            self._trained[past] = rewarded(self._trained[past], rewards)
        self._trained[step], self._patience = groups, dict(patience)

    def trace(self, trace_id: str) -> Trace | None:
        """Return a trajectory of a remembered rollout, or None."""
        found = (t for groups in self._trained.values() for t in _trajectories(groups))
        return next((trace for trace in found if trace.trace_id == trace_id), None)

    def _forget(self, step: int) -> None:
        for old in [past for past in self._trained if step - past > self._max_age]:
            del self._trained[old]

    def _corrected(
        self, trained: int, rewards: list[LateReward], found: Corrections
    ) -> list[tuple[Trace, Advantage]]:
        before = self._trained[trained]
        found.use(rewards)
        after = rewarded(before, found.rewards)
        found.counts["rewards"] += len(rewards)
        self._trained[trained] = after
        old, new = (trajectory_advantages(self._advantages, groups) for groups in (before, after))
        changes = [
            (trace, _change(old[trace.trace_id], new[trace.trace_id]))
            for trace in _trajectories(after)
            if trace.turns
        ]
        return [(trace, change) for trace, change in changes if change]

    def _step_of(self, trace_id: str) -> int | None:
        """Return the step that trained a rollout, None where it is not remembered."""
        for step, groups in self._trained.items():
            if any(trace.trace_id == trace_id for group in groups for trace in group):
                return step
        return None

    def _expire(self, reward: LateReward, found: Corrections) -> None:
        found.settled.append((reward, ItemState.EXPIRED))
        found.counts["expired"] += 1
        self._report(
            f"the reward {reward.reward:g} for {reward.trace_id} has waited more than "
            f"{self._max_age} steps, and none of them had its rollout: raise late_rewards.max_age"
        )


def rewarded(groups: Sequence[Sequence[Trace]], late: Mapping[str, float]) -> Groups:
    """Return the groups with the rewards in `late`, keyed by trace, in place of their own."""
    return [
        [dataclasses.replace(t, reward=late.get(t.trace_id, t.reward)) for t in group]
        for group in groups
    ]


def _change(old: Advantage, new: Advantage) -> Advantage:
    """Return the difference of two advantages; 0 where no turn's differs enough."""
    if isinstance(old, list) and isinstance(new, list):
        changes = [now - then for then, now in zip(old, new, strict=True)]
        return changes if any(abs(change) > SMALLEST_CHANGE for change in changes) else 0.0
    assert not isinstance(old, list)
    assert not isinstance(new, list)
    return new - old if abs(new - old) > SMALLEST_CHANGE else 0.0


def _trajectories(groups: Iterable[Iterable[Trace]]) -> list[Trace]:
    return [one for group in groups for trace in group for one in trace.trajectories()]


def make_late_rewards(
    config: Config,
    waiting: Callable[[], Sequence[LateReward]],
    advantages: Advantages,
    report: Callable[[str], object],
) -> LateRewards | None:
    """Build the reader of posted rewards; None where late rewards are off."""
    if not config.late_rewards.on:
        return None
    return LateRewards(waiting, advantages, config.late_rewards.max_age, report)
