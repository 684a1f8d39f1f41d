"""Estimated value of a teacher's answer to a state: the weighted mean of four signals in [0, 1].

- error: 1 if the turn's own action failed, 0.5 if only its episode did, else 0.
- entropy: 1 - exp(-s / entropy_scale), where s is the mean surprisal in nats of the turn's sampled
  tokens: a one-sample estimate of the entropy.
- disagreement: the mean of two shares. The first is the share of the group's other samples in the
  same context (the same token ids) that acted differently. The second is the spread of the group's
  rewards, 4 times their variance: 1 if half have reward 0 and half 1, and at most 1.
- novelty: 1 / (1 + number of earlier queries about the same situation).

`state_choice` selects states by these values.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from composer_mesh.configs.gate import GateConfig
from composer_mesh.rollouts.actions import ActionKey
from composer_mesh.rollouts.pairs import StudentState
from composer_mesh.rollouts.tool_calls import ToolCall, parse_action
from composer_mesh.rollouts.traces import Trace

LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class StateSignals:
    """Signals of one state; the names are those of the weights in `GateConfig`."""

    error: float
    entropy: float
    disagreement: float
    novelty: float


def state_value(signs: StateSignals, gate: GateConfig) -> float:
    """Return the mean of the signals by the gate's weights, from 0 to 1."""
    weighted = (
        (gate.error, signs.error),
        (gate.entropy, signs.entropy),
        (gate.disagreement, signs.disagreement),
        (gate.novelty, signs.novelty),
    )
    largest = max(weight for weight, _ in weighted)
    shares = [weight / largest for weight, _ in weighted]  # their sum cannot overflow
    total = sum(share * sign for share, (_, sign) in zip(shares, weighted, strict=True))
    return min(1.0, total / sum(shares))


def error_sign(trace: Trace, turn: int) -> float:
    if error_kind(trace, turn):
        return 1.0
    return 0.0 if trace.success else 0.5


def error_kind(trace: Trace, turn: int) -> str:
    """Return the kind of the error at a turn, or "" if there is none."""
    return next((site.error_kind for site in trace.error_sites if site.turn == turn), "")


def entropy_sign(logprobs: Sequence[float], scale: float) -> float:
    """Return the student's uncertainty from the log-probs (nats) of its sampled tokens."""
    if not logprobs:
        return 0.0
    return -math.expm1(-max(0.0, -fmean(logprobs)) / scale)


def action_disagreement(own: ActionKey, same_context: Mapping[ActionKey, int]) -> float:
    """Return the share of other samples in a context that acted differently.

    `same_context` counts all samples.
    """
    others = sum(same_context.values()) - 1
    if others < 1:
        return 0.0
    return (others + 1 - same_context[own]) / others


def reward_spread(rewards: Sequence[float]) -> float:
    """Return 4 times the variance, at most 1: the uncertainty of the group's success."""
    return min(1.0, 4 * pvariance(rewards)) if rewards else 0.0


def situation(trace: Trace, turn: int, action_text: str) -> str:
    """Return a coarse name of a state: task, preceding error, the student's action, its error.

    States of one name are similar enough that an answer about one is informative about the others.
    """
    action = parse_action(action_text)
    did = "answers" if action is None else "malformed"
    if isinstance(action, ToolCall):
        did = f"calls {action.name[:LONGEST_NAME]}"
    before = error_kind(trace, turn - 1) or ("opening" if turn == 0 else "going on")
    return f"{trace.task}: {before}: {did}: {error_kind(trace, turn) or 'no error'}"


class Novelty:
    """Number of queries for each situation; pass `counts` to restore an instance."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def count_queries(self, states: Iterable[StudentState]) -> None:
        """Count states that are sent to teachers."""
        self._counts.update(state.situation for state in states)

    def restore(self, situations: Iterable[str]) -> None:
        """Count states that an earlier process of the run has sent to teachers."""
        self._counts.update(situations)

    def sign(self, name: str) -> float:
        """Return the novelty signal of a situation."""
        return 1 / (1 + self._counts[name])
