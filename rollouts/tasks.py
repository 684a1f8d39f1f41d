"""Episodes as rollouts see them: which one it is, the result of an action, and the outcome.

What an episode is made of is up to its task (`composer_mesh.tasks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.traces import ErrorSite, Message, Split, pickled_by_position


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
