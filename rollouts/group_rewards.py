"""Rewards that concern a whole group: those that all of its rollouts do without.

Rewards of a group are compared with each other, so each is made of the same parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from composer_mesh.rollouts.traces import Trace


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


def _without(trace: Trace, names: Sequence[str], weights: Mapping[str, float]) -> Trace:
    rewards = {name: value for name, value in trace.rewards.items() if name not in names}
    reward = total_reward(rewards, weights, trace.penalty) + math.fsum(trace.turn_rewards)
    return replace(trace, rewards=rewards, reward=reward, left_out=list(names))
