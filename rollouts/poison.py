"""Counting of episodes that fail repeatedly in the same way, without calls or clocks.

A deterministic failure recurs in each attempt, so equal failures of one episode indicate a fault of
the episode. Concurrent attempts count once, because one cause may have hit all of them.
`services.episodes.rollout` decides which errors are equal and what happens to an episode.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from composer_mesh.rollouts.tasks import Episode


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
