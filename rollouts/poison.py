"""Episodes that fail again and again in the same way: the counting, without calls or clocks.

A deterministic failure comes back in each attempt, so equal failures of one episode speak against
the episode. Attempts that were under way together count once, because one cause may have hit them
all. Which errors are equal, and what is done about an episode, is `services.retries`.
"""

from collections import Counter
from dataclasses import dataclass

from composer_mesh.rollouts.tasks import Episode


@dataclass(frozen=True, slots=True)
class PoisonedInput:
    """An episode that was set aside. `attempts` are those of its samples that failed.

    `cause` is the class of the failure; `error` and `traceback` may hold text that a model wrote.
    """

    episode: Episode
    cause: str
    error: str
    traceback: str
    attempts: int


class Trial:
    """The failures of one episode's attempts.

    began = trial.begin()       an attempt begins
    trial.failed(began, key)    it failed; returns how often that was seen
    """

    def __init__(self) -> None:
        self.attempts = 0
        """Attempts that failed."""
        self._moment = 0
        self._counts: Counter[str] = Counter()
        self._counted: dict[str, int] = {}

    def begin(self) -> int:
        """The moment at which an attempt begins."""
        self._moment += 1
        return self._moment

    def failed(self, began: int, key: str | None) -> int:
        """Count a failure; returns how often one with its key was seen independently.

        None stands for what the attempt had no part in: it speaks against nothing.
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
    """Whether most groups of a step lack most of their rollouts, and how many steps running."""

    def __init__(self, most: int = 2) -> None:
        self._most, self._running = most, 0

    def step(self, sizes: list[int], wanted: int) -> bool:
        """Take note of the sizes of a step's groups; True where it has gone on for too long."""
        short = short_groups(sizes, wanted)
        self._running = self._running + 1 if 2 * short > len(sizes) else 0
        return self._running >= self._most


def short_groups(sizes: list[int], wanted: int) -> int:
    """How many groups have fewer than half of the rollouts that they should have."""
    return sum(2 * size < wanted for size in sizes)
