"""Which generator takes a request: the one that holds its prefix, unless it is far busier.

    first request of a group      the least busy generator, which becomes the group's
    later ones of the group       the group's generator: its samples share the prompt
    later ones of an episode      the generator of its previous turn

A generator counts as far busier than the least busy one with more than `FACTOR` times its requests
and `SLACK` more: the request then goes to the least busy one, and so do those that follow. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

FACTOR = 2
SLACK = 16


class StickyRouting:
    """The generators of the groups and episodes that are played."""

    def __init__(self, load: Callable[[str], int]) -> None:
        """`load` returns the requests that a generator has not answered."""
        self._load = load
        self._groups: dict[str, str] = {}
        self._episodes: dict[str, str] = {}
        self._members: Counter[str] = Counter()

    def begin(self, group: str) -> None:
        """Count an attempt at a sample of a group."""
        self._members[group] += 1

    def end(self, group: str, episode: str) -> None:
        """Forget an episode, and its group with the last one."""
        self._episodes.pop(episode, None)
        self._members[group] -= 1
        if self._members[group] <= 0:
            del self._members[group]
            self._groups.pop(group, None)

    def take(self, group: str, episode: str, generators: Sequence[str]) -> str:
        """Return the generator for the next request of an episode, one of those given."""
        least = min(generators, key=self._load)
        home = self._episodes.get(episode) or self._groups.get(group)
        if home is None or home not in generators or self._far_busier(home, least):
            home = least
            self._groups[group] = home
        self._episodes[episode] = home
        return home

    def _far_busier(self, one: str, least: str) -> bool:
        return self._load(one) > FACTOR * self._load(least) + SLACK
