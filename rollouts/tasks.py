"""What a task is: episodes from a seed, sessions that step, and an expert for demonstrations.

Only the protocols; the tasks are files of their own, and `task_choice` makes one.
"""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from composer_mesh.rollouts.traces import ErrorSite, Message, Split


@dataclass(frozen=True, slots=True)
class Episode:
    """A problem, complete: the same episode gives the same session anywhere."""

    task: str
    split: Split
    index: int
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action caused. `messages` are new to the agent; `reward` counts once, at `done`."""

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
    """A family of episodes. Train and held-out episodes never share a problem."""

    name: str
    tools: list[dict[str, Any]]

    def episode(self, split: Split, index: int) -> Episode: ...

    def session(self, episode: Episode) -> Session: ...

    def answer(self, episode: Episode) -> str:
        """The verified answer as a hint would have to write it; hints that hold it are refused."""
        ...

    def expert(self, messages: list[Message]) -> str:
        """The right action's text, found from the messages alone."""
        ...

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """A wrong action's text for the same messages, of a kind that real agents write."""
        ...
