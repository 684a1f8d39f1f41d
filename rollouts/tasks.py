"""Protocols of a task: seeded episodes, step-wise sessions, and an expert for demonstrations.

The tasks are in modules of their own; `task_choice` creates one.
"""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from composer_mesh.rollouts.traces import ErrorSite, Message, Split


@dataclass(frozen=True, slots=True)
class Episode:
    """A complete problem: the same episode gives the same session in any process."""

    task: str
    split: Split
    index: int
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an action. `messages` are new to the agent; `reward` counts once, at `done`."""

    messages: list[Message]
    done: bool
    reward: float
    success: bool
    error: ErrorSite | None


class Session(Protocol):
    """One running episode. `state(t)` is exactly what the agent saw before its action t."""

    @property
    def messages(self) -> list[Message]: ...

    def step(self, text: str) -> StepResult: ...

    def state(self, turn: int) -> list[Message]: ...


class Task(Protocol):
    """A family of episodes. Training and held-out episodes never share a problem."""

    name: str
    tools: list[dict[str, Any]]

    def episode(self, split: Split, index: int) -> Episode: ...

    def session(self, episode: Episode) -> Session: ...

    def answer(self, episode: Episode) -> str:
        """Return the verified answer in the form in which a hint would leak it."""
        ...

    def expert(self, messages: list[Message]) -> str:
        """Return the text of the correct action, derived from the messages alone."""
        ...

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return the text of a realistic wrong action for the same messages."""
        ...
