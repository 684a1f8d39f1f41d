"""Episodes as rollouts see them: which one it is, the result of an action, and the outcome.

What an episode is made of is up to its task (`composer_mesh.tasks`).

Rewards that concern a whole group: those of all its rollouts together, and those left out of it.
Rewards of a group are compared with each other, so each is made of the same parts.

Episodes that fail repeatedly in the same way, without calls or clocks: a deterministic failure
recurs in each attempt, so equal failures of one episode indicate a fault of the episode. Concurrent
attempts count once, because one cause may have hit all of them. `services.episodes.rollout` decides
which errors are equal and what happens to an episode.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from composer_mesh.rollouts.traces import ErrorSite, Message, Split, Trace, pickled_by_position


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Episode:
    """A problem: the same episode gives the same session in any process.

    `payload` is the task's row. The environment that plays the episode fills it in; elsewhere it
    may be empty.
    """

    task: str
    split: Split
    index: int
    payload: Mapping[str, Any] = field(default_factory=dict)


@pickled_by_position
@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an action. `messages` are new to the agent; `error` is set if the action failed."""

    messages: list[Message]
    done: bool
    error: ErrorSite | None


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished episode: its conversation and how it was scored.

    `rewards` are the values of the task's reward functions by name, before weights; those that are
    `left_out` have none. `penalty` is what failed calls cost. `answer` is the verified answer that
    no hint may contain; None if the task states none. `turn_rewards` are the parts of `reward` that
    were given for single turns, one for each; empty if there were none. A rollout that is
    `screened` is compared with no other, and nothing of it is trained. `episode_id` is what a
    server of the environment calls the episode; empty without one.
    """

    messages: list[Message]
    reward: float
    success: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    penalty: float = 0.0
    left_out: tuple[str, ...] = ()
    turn_rewards: list[float] = field(default_factory=list)
    screened: bool = False
    episode_id: str = ""


SMALLEST_GROUP = 2
"""Rollouts below which there is nothing to compare, so that group rewards are left out."""


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """What group rewards read of a rollout: its conversation, error sites and own rewards."""

    messages: list[Message]
    errors: list[ErrorSite]
    rewards: dict[str, float]

    @classmethod
    def of(cls, trace: Trace) -> "FinishedRollout":
        return cls(trace.messages, trace.error_sites, trace.rewards)


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The values of each group reward in the order of the rollouts; `left_out` ones have none."""

    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def total_reward(
    values: Mapping[str, float], weights: Mapping[str, float], penalty: float
) -> float:
    """Return the weighted sum of a rollout's rewards less its penalty, which takes none below 0.

    Rewards without a weight are those of turns, and no part of it.
    """
    total = sum(weight * values[name] for name, weight in weights.items() if name in values)
    return max(min(0.0, total), total - penalty)


def without_left_out(group: Sequence[Trace], weights: Mapping[str, float]) -> list[Trace]:
    """Return a group in which a reward that one rollout does without is left out of all.

    `weights` are those of the task's rewards. Success stays as it was measured.
    """
    names = sorted({name for trace in group for name in trace.left_out})
    return [_without(trace, names, weights) for trace in group] if names else list(group)


def with_group_score(
    group: Sequence[Trace], score: GroupScore, weights: Mapping[str, float]
) -> list[Trace]:
    """Return a group with its group rewards added.

    All trajectories of a rollout get its value, except those with an advantage of their own.
    """
    return [
        _added(trace, {name: found[place] for name, found in score.values.items()}, score, weights)
        for place, trace in enumerate(group)
    ]


def _without(trace: Trace, names: Sequence[str], weights: Mapping[str, float]) -> Trace:
    rewards = {name: value for name, value in trace.rewards.items() if name not in names}
    reward = total_reward(rewards, weights, trace.penalty) + math.fsum(trace.turn_rewards)
    return replace(trace, rewards=rewards, reward=reward, left_out=list(names))


def _added(
    trace: Trace, values: Mapping[str, float], score: GroupScore, weights: Mapping[str, float]
) -> Trace:
    others = [_added(other, values, score, weights) for other in trace.others]
    if trace.has_own_advantage:
        return replace(trace, others=others)
    bonus = sum(weights[name] * value for name, value in values.items())
    return replace(
        trace,
        others=others,
        reward=trace.reward + bonus,
        rewards={**trace.rewards, **values},
        left_out=[*trace.left_out, *score.left_out],
    )


@dataclass(frozen=True, slots=True)
class PoisonedInput:
    """A quarantined episode. `attempts` counts the failed attempts of its samples.

    `cause` is the class of the failure; `error` and `traceback` may contain model-written text.
    """

    episode: Episode
    cause: str
    error: str
    traceback: str
    attempts: int


class Trial:
    """Failure counts of one episode's attempts.

    began = trial.begin()       start an attempt
    trial.failed(began, key)    record its failure; returns how often it was seen
    """

    def __init__(self) -> None:
        self.attempts = 0
        """Number of failed attempts."""
        self._moment = 0
        self._counts: Counter[str] = Counter()
        self._counted: dict[str, int] = {}

    def begin(self) -> int:
        """Return the logical time at which an attempt starts."""
        self._moment += 1
        return self._moment

    def failed(self, began: int, key: str | None) -> int:
        """Count a failure; return how often one with its key was seen in non-concurrent attempts.

        A None key marks a failure that the attempt did not cause; it is not counted.
        """
        self.attempts += 1
        if key is None:
            return 0
        if began > self._counted.get(key, 0):
            self._counts[key] += 1
            self._moment += 1
            self._counted[key] = self._moment
        return self._counts[key]


class Shortage:
    """Detects consecutive steps in which most groups lack most of their rollouts."""

    MOST: ClassVar[int] = 2

    def __init__(self) -> None:
        self._running = 0

    def step(self, sizes: list[int], wanted: int) -> bool:
        """Record the group sizes of a step; return True after `MOST` short steps in a row."""
        short = short_groups(sizes, wanted)
        self._running = self._running + 1 if 2 * short > len(sizes) else 0
        return self._running >= self.MOST


def short_groups(sizes: list[int], wanted: int) -> int:
    """Return the number of groups with fewer than half of the wanted rollouts."""
    return sum(2 * size < wanted for size in sizes)
