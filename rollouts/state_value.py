"""What a teacher's answer to a state may be worth: four signs from 0 to 1, and their mean.

- error: 1 where the turn's own action failed, 0.5 where only its episode did, else 0.
- entropy: 1 - exp(-s / entropy_scale), s the mean surprisal in nats of the turn's sampled tokens.
  That is an estimate of the entropy from the one sample there is.
- disagreement: the mean of two shares. How many of the group's other samples that stood in the
  same context (the same token ids) did something else there; and how far the group's rewards are
  spread, as 4 times their variance: 1 where half have reward 0 and half 1, and at most 1.
- novelty: 1 / (1 + times that the caller has asked about such a situation before).

Pure rules about one state. Which states are chosen is `state_choice`.
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
class Signs:
    """The signs of one state; the names are those of the weights in `GateConfig`."""

    error: float
    entropy: float
    disagreement: float
    novelty: float


def state_value(signs: Signs, gate: GateConfig) -> float:
    """The signs' mean by the gate's weights, from 0 to 1."""
    weighted = (
        (gate.error, signs.error),
        (gate.entropy, signs.entropy),
        (gate.disagreement, signs.disagreement),
        (gate.novelty, signs.novelty),
    )
    largest = max(weight for weight, _ in weighted)
    shares = [weight / largest for weight, _ in weighted]  # their sum can not overflow
    total = sum(share * sign for share, (_, sign) in zip(shares, weighted, strict=True))
    return min(1.0, total / sum(shares))


def error_sign(trace: Trace, turn: int) -> float:
    if error_kind(trace, turn):
        return 1.0
    return 0.0 if trace.success else 0.5


def error_kind(trace: Trace, turn: int) -> str:
    """The kind of the error at a turn, or "" where there is none."""
    return next((site.error_kind for site in trace.error_sites if site.turn == turn), "")


def entropy_sign(logprobs: Sequence[float], scale: float) -> float:
    """How unsure the student was, from the log-probs (nats) of the tokens that it sampled."""
    if not logprobs:
        return 0.0
    return -math.expm1(-max(0.0, -fmean(logprobs)) / scale)


def action_disagreement(own: ActionKey, same_context: Mapping[ActionKey, int]) -> float:
    """The share of the others in a context who acted otherwise; `same_context` counts all."""
    others = sum(same_context.values()) - 1
    if others < 1:
        return 0.0
    return (others + 1 - same_context[own]) / others


def reward_spread(rewards: Sequence[float]) -> float:
    """4 times the variance, at most 1: how much it is open whether the group's prompt succeeds."""
    return min(1.0, 4 * pvariance(rewards)) if rewards else 0.0


def situation(trace: Trace, turn: int, action_text: str) -> str:
    """A coarse name of a state: task, the error before it, what the student did, the error it made.

    States of one name are alike enough that an answer about one tells something about the others.
    """
    action = parse_action(action_text)
    did = "answers" if action is None else "malformed"
    if isinstance(action, ToolCall):
        did = f"calls {action.name[:LONGEST_NAME]}"
    before = error_kind(trace, turn - 1) or ("opening" if turn == 0 else "going on")
    return f"{trace.task}: {before}: {did}: {error_kind(trace, turn) or 'no error'}"


class Novelty:
    """How often each situation was asked about; `counts` make the same one again."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def asked(self, states: Iterable[StudentState]) -> None:
        """Counts states that teachers are asked about."""
        self._counts.update(state.situation for state in states)

    def know(self, situations: Iterable[str]) -> None:
        """Counts states that an earlier process of the run has asked about."""
        self._counts.update(situations)

    def sign(self, name: str) -> float:
        """The novelty of a situation."""
        return 1 / (1 + self._counts[name])
