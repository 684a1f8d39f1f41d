"""Advantages of a step's groups of finished rollouts, as configured: of rollouts or of turns.

The functions are in `losses.advantages`; groups may be of unequal size, where a rollout failed.

Axes: P prompts, G rollouts of the largest group, T sampled tokens of the longest rollout.

Advantages of a step's turns, as configured: one number for each turn of each rollout.

A rollout's reward has the parts that were given for turns (`Trace.turn_rewards`), and the outcome,
which is on the last turn.

Axes: P prompts, G rollouts of the largest group, K turns of the longest rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from composer_mesh.configs import advantages as configs
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.losses.advantages import (
    gigpo_advantages,
    gpg_advantages,
    group_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    masked_whiten,
    max_rl_advantages,
    mt_grpo_advantages,
    opo_advantages,
    overlong_penalty,
    reinforce_plus_plus_baseline_advantages,
    relative_length_penalty,
    rloo_advantages,
    turn_return_advantages,
)
from composer_mesh.rollouts.batches import Advantage
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.custom_functions import (
    CustomFunctionProcess,
    FunctionRequests,
    Start,
    answer_of,
    shown_rollout,
)

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


Advantages = Callable[[Groups], Sequence[Sequence[Advantage]]]
OfRollouts = (
    configs.GroupAdvantage
    | configs.RlooAdvantage
    | configs.MaxRlAdvantage
    | configs.OpoAdvantage
    | configs.GpgAdvantage
    | configs.ReinforcePlusPlusAdvantage
)


def make_advantages(
    config: configs.AdvantageConfig,
    limit_s: float = SupervisionConfig().custom_function_s,
    start: Start = CustomFunctionProcess,
) -> Advantages:
    """Return the configured advantage function.

    A custom one is imported now, in a process of its own, and each call of it may take `limit_s`.
    Waits for that.
    """
    if isinstance(config, configs.CustomAdvantage):
        return CustomAdvantages(config, start(config.import_path, limit_s))
    if isinstance(config, configs.TURN_ADVANTAGES):
        return lambda groups: _of_turns(config, groups)
    return lambda groups: _of_rollouts(config, groups)


def trajectory_advantages(advantages: Advantages, groups: Groups) -> dict[str, Advantage]:
    """Return the advantage of every trajectory of the groups by trace id.

    Those without one of their own are compared by `advantages`.
    """
    compared = [part for group in groups for part in compared_with_each_other(group)]
    found: dict[str, Advantage] = {
        one.trace_id: _own(one)
        for group in groups
        for trace in group
        for one in trace.trajectories()
        if one.has_own_advantage
    }
    for part, values in zip(compared, advantages(compared), strict=True):
        found |= {one.trace_id: value for one, value in zip(part, values, strict=True)}
    return found


def compared_with_each_other(group: Sequence[Trace]) -> list[list[Trace]]:
    """Return the trajectories of a group by role, without those that have an advantage already."""
    parts: dict[str, list[Trace]] = {"": []}
    for trace in group:
        for one in trace.trajectories():
            if not one.has_own_advantage:
                parts.setdefault(one.role, []).append(one)
    return [part for role, part in parts.items() if part or not role]


def _own(trace: Trace) -> Advantage:
    if trace.turn_advantages:
        return list(trace.turn_advantages)
    assert trace.advantage is not None
    return trace.advantage


class CustomAdvantages:
    """A user's advantage function, called elsewhere."""

    def __init__(self, config: configs.CustomAdvantage, function: FunctionRequests) -> None:
        """Import the function; raises `CustomFunctionError` if it cannot be called."""
        self._function = function
        answer_of(function, {"import_path": config.import_path, "kwargs": config.kwargs})

    def __call__(self, groups: Groups) -> list[list[float]]:
        shown = [[shown_rollout(trace) for trace in group] for group in groups]
        ids = [[trace.trace_id for trace in group] for group in groups]
        found: list[list[float]] = answer_of(self._function, {"groups": shown, "ids": ids})[
            "advantages"
        ]
        return found


def _of_turns(config: OfTurns, groups: Groups) -> list[list[Advantage]]:
    rewards, _, present = _rewards(config.length_penalty, groups)
    return by_turn(advantages_of_turns(config, groups, rewards, present), groups)


def _rewards(config: configs.LengthPenalty, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards with their length terms, lengths, and what is present, each [P, G]."""
    rewards, present = _padded([[trace.reward for trace in group] for group in groups])
    lengths, _ = _padded([[trace.action_tokens() for trace in group] for group in groups])
    terms = _length_terms(config, rewards, lengths, present, groups)
    return rewards + terms, lengths, present


def _of_rollouts(config: OfRollouts, groups: Groups) -> list[list[float]]:
    rewards, lengths, present = _rewards(config.length_penalty, groups)
    found: Tensor
    match config:
        case configs.GroupAdvantage():
            found = group_advantages(
                rewards, eps=config.eps, std=config.std, scale=config.scale, present=present
            )
        case configs.RlooAdvantage():
            found = rloo_advantages(rewards, present=present)
        case configs.MaxRlAdvantage():
            found = max_rl_advantages(rewards, present=present)
        case configs.OpoAdvantage():
            found = opo_advantages(rewards, lengths, present=present)
        case configs.GpgAdvantage():
            found = gpg_advantages(rewards, present=present)
        case configs.ReinforcePlusPlusAdvantage():
            found = _whitened(config, rewards, present, groups)
    return [row[: len(group)].tolist() for row, group in zip(found, groups, strict=True)]


def _length_terms(
    config: configs.LengthPenalty, rewards: Tensor, lengths: Tensor, present: Tensor, groups: Groups
) -> Tensor:
    """What the length of each rollout adds to its reward [P, G]."""
    match config:
        case configs.OverlongPenalty():
            return overlong_penalty(lengths, **config.model_dump(exclude={"type"}))
        case configs.KimiLengthPenalty():
            success, _ = _padded([[trace.success for trace in group] for group in groups])
            return config.weight * kimi_length_reward(lengths, success.bool(), present=present)
        case configs.RelativeLengthPenalty():
            return relative_length_penalty(rewards, lengths, weight=config.weight, present=present)
        case configs.GrpoLeadLengthPenalty():
            success, _ = _padded([[trace.success for trace in group] for group in groups])
            return grpo_lead_length_reward(
                rewards, lengths, success.bool(), alpha=config.alpha, present=present
            )
        case configs.NoLengthPenalty():
            return torch.zeros_like(rewards)


def _whitened(
    config: configs.ReinforcePlusPlusAdvantage, rewards: Tensor, present: Tensor, groups: Groups
) -> Tensor:
    """Return REINFORCE++ advantages without discount: one value per rollout [P, G]."""
    mask = _token_mask(groups, rewards.shape)
    if config.baseline:
        return reinforce_plus_plus_baseline_advantages(rewards, mask, present=present)[..., 0]
    return masked_whiten(rewards.unsqueeze(-1).expand_as(mask), mask)[..., 0]


def _token_mask(groups: Groups, shape: torch.Size) -> Tensor:
    """Return a mask [P, G, T] that is True for as many positions as each rollout has sampled
    tokens."""
    counts = torch.zeros(shape, dtype=torch.long)
    for row, group in enumerate(groups):
        for column, trace in enumerate(group):
            counts[row, column] = trace.action_tokens()
    longest = max(1, int(counts.max()) if counts.numel() else 1)
    return torch.arange(longest) < counts.unsqueeze(-1)


def _padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Pad the values of unequal groups to [P, G]; return them with a mask of those present."""
    widest = max((len(row) for row in rows), default=0)
    values = torch.zeros(len(rows), widest)
    present = torch.zeros(len(rows), widest, dtype=torch.bool)
    for index, row in enumerate(rows):
        values[index, : len(row)] = torch.tensor(row)
        present[index, : len(row)] = True
    return values, present
