"""Advantages of a step's turns, as configured: one number for each turn of each rollout.

A rollout's reward has the parts that were given for turns (`Trace.turn_rewards`), and the outcome,
which is on the last turn.

Axes: P prompts, G rollouts of the largest group, K turns of the longest rollout.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from composer_mesh.configs import advantages as configs
from composer_mesh.losses.advantages import (
    gigpo_advantages,
    mt_grpo_advantages,
    turn_return_advantages,
)
from composer_mesh.rollouts.batches import Advantage
from composer_mesh.rollouts.traces import Trace

Groups = Sequence[Sequence[Trace]]
OfTurns = configs.TurnReturnsAdvantage | configs.MtGrpoAdvantage | configs.GigpoAdvantage


def advantages_of_turns(
    config: OfTurns,
    groups: Groups,
    totals: Tensor,
    present: Tensor,
) -> Tensor:
    """Return the advantages [P, G, K]; `totals` are all rewards of the rollouts [P, G]."""
    given, mask = _turn_rewards(groups, present)
    outcomes = _outcomes(groups, totals)
    compare = partial(_compare(config), eps=config.eps, std=config.std, scale=config.scale)
    if isinstance(config, configs.MtGrpoAdvantage):
        return compare(given, outcomes, mask)
    rewards = _at_the_end(given, outcomes, groups)
    if isinstance(config, configs.GigpoAdvantage):
        return compare(rewards, totals, mask, _states(groups, mask, config.state))
    return compare(rewards, mask)


def _compare(config: OfTurns) -> Callable[..., Tensor]:
    """Return the configured function with the options of its own."""
    match config:
        case configs.MtGrpoAdvantage():
            return partial(mt_grpo_advantages, outcome_weight=config.outcome_weight)
        case configs.GigpoAdvantage():
            weight = config.step_weight
            return partial(gigpo_advantages, gamma=config.gamma, step_weight=weight)
        case configs.TurnReturnsAdvantage():
            baseline = config.baseline
            return partial(turn_return_advantages, gamma=config.gamma, baseline=baseline)


def by_turn(found: Tensor, groups: Groups) -> list[list[Advantage]]:
    """Return the advantages of each rollout's turns, without padding."""
    return [
        [row[column, : len(trace.turns)].tolist() for column, trace in enumerate(group)]
        for row, group in zip(found, groups, strict=True)
    ]


def _turn_rewards(groups: Groups, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rewards given for turns [P, G, K], and the mask of the turns that exist."""
    longest = max((len(trace.turns) for group in groups for trace in group), default=0)
    rewards = torch.zeros(*present.shape, longest)
    mask = torch.zeros(rewards.shape, dtype=torch.bool)
    for row, group in enumerate(groups):
        for column, trace in enumerate(group):
            mask[row, column, : len(trace.turns)] = True
            if trace.turn_rewards:
                rewards[row, column, : len(trace.turns)] = torch.tensor(trace.turn_rewards)
    return rewards, mask


def _outcomes(groups: Groups, totals: Tensor) -> Tensor:
    """Return what of the totals was not given for turns [P, G]; unchanged without turn rewards."""
    outcomes = totals.clone()
    for row, group in enumerate(groups):
        for column, trace in enumerate(group):
            if trace.turn_rewards:
                outcomes[row, column] = float(totals[row, column]) - (trace.reward - trace.outcome)
    return outcomes


def _at_the_end(rewards: Tensor, outcomes: Tensor, groups: Groups) -> Tensor:
    """Add the outcome of each rollout to its last turn."""
    found = rewards.clone()
    for row, group in enumerate(groups):
        for column, trace in enumerate(group):
            if trace.turns:
                found[row, column, len(trace.turns) - 1] += outcomes[row, column]
    return found


def _states(groups: Groups, mask: Tensor, kind: str) -> Tensor:
    """Return a number for the state of each turn [P, G, K]: equal ones are equal states."""
    states = torch.zeros(mask.shape, dtype=torch.long)
    for row, group in enumerate(groups):
        known: dict[tuple[int, ...], int] = {}
        for column, trace in enumerate(group):
            for number, turn in enumerate(trace.turns):
                read = turn.context_ids if kind == "observation" else trace.prompt_ids(number)
                states[row, column, number] = known.setdefault(tuple(read), len(known))
    return states
