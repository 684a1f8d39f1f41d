"""The order of training episodes: one after the other, or chosen by their success so far. Pure.

    results of the steps that made version v --+
    choices of the groups before group i ------+--> episode of group i
    the run's seed ----------------------------+

A group that enters while version v is served is chosen for by the results of the steps before v
alone, whatever else has finished, so that a run repeats and a resumed one continues as it would
have.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from composer_mesh.configs.data import CurriculumConfig
from composer_mesh.rollouts.episode import seed_of
from composer_mesh.rollouts.traces import Trace


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group has measured: successes among the samples of its episode that were played."""

    group_id: int
    episode: int
    successes: int
    samples: int


class Episodes(Protocol):
    """Training episodes of one or several tasks: each task's own, and all under one index."""

    def locate(self, index: int) -> tuple[str, int]:
        """Return the task of an episode, and its index there."""

    def index_of(self, task: str, own: int) -> int:
        """Return the index of a task's `own`-th episode."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """One task: its weight, and the number of its different episodes; None if it makes them."""

    task: str
    weight: float = 1.0
    size: int | None = None


class EpisodeOrder:
    """Chooses the episode of each training group: group i plays episode i.

    Of n islands each plays every n-th one.
    """

    def __init__(self, first: int = 0, every: int = 1) -> None:
        self._first, self._every = first, every

    def restore(self, group_id: int, episode: int, /) -> None:
        """Record the choice that an earlier process of the run has made for a group."""

    def choose(self, group_id: int, version: int, /) -> int:  # noqa: ARG002
        """Return the episode of a group that enters while `version` is served."""
        return self._first + self._every * group_id

    def results(self, groups: Iterable[tuple[int, Sequence[Trace]]], /) -> tuple[GroupResult, ...]:  # noqa: ARG002
        """Return what a step's groups have measured, if anything depends on it."""
        return ()

    def settle(self, step: int, results: Sequence[GroupResult], /) -> None:
        """Record the results of all groups that a step has taken, steps in order."""

    def figures(self, results: Sequence[GroupResult], /) -> dict[str, float]:  # noqa: ARG002
        """Return the metrics of the step that was settled last."""
        return {}


class Curriculum(EpisodeOrder):
    """Prefers episodes and tasks whose measured success is in the config's band.

    A group's task is drawn by the tasks' weights, times how near their latest success is to the
    band. In it the group plays the episode in the band that was played longest ago, and none that
    is under way; with probability `explore`, or if there is none, the task's next new one. New
    episodes are taken in order, and none is left out; of n islands each takes every n-th one.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        seed: int,
        sources: Sequence[TaskSource],
        episodes: Episodes,
        first: int = 0,
        every: int = 1,
    ) -> None:
        super().__init__(first, every)
        self._config, self._seed, self._episodes = config, seed, episodes
        self._parts = {one.task: _Part(one, config, first, every) for one in sources}
        self._choices: dict[int, int] = {}
        self._waiting: deque[tuple[int, Sequence[GroupResult]]] = deque()

    def restore(self, group_id: int, episode: int, /) -> None:
        self._choices[group_id] = episode
        task, own = self._episodes.locate(episode)
        self._parts[task].take(own, group_id)

    def choose(self, group_id: int, version: int, /) -> int:
        if group_id not in self._choices:
            self._learn(version)
            place = super().choose(group_id, version)
            rng = random.Random(seed_of(self._seed, f"curriculum-{place}"))
            by_weight, by_chance = rng.random(), rng.random()
            part = self._drawn(by_weight)
            own = None
            if by_chance >= self._config.explore:
                own = part.in_band(group_id)
            own = part.next_new if own is None else own
            self.restore(group_id, self._episodes.index_of(part.source.task, own))
        return self._choices[group_id]

    def results(self, groups: Iterable[tuple[int, Sequence[Trace]]], /) -> tuple[GroupResult, ...]:
        return tuple(
            GroupResult(n, self._choices[n], sum(one.success for one in traces), len(traces))
            for n, traces in sorted(groups, key=lambda group: group[0])
        )

    def settle(self, step: int, results: Sequence[GroupResult], /) -> None:
        for one in results:
            if one.group_id not in self._choices:
                self.restore(one.group_id, one.episode)
        self._waiting.append((step, results))

    def figures(self, results: Sequence[GroupResult], /) -> dict[str, float]:
        places = [(self._episodes.locate(one.episode), one) for one in results]
        new = sum(self._parts[task].is_first(own, one.group_id) for (task, own), one in places)
        fits = sum(self._config.holds(one.successes, one.samples) for one in results)
        count = max(1, len(results))
        return {
            "curriculum/new": new / count,
            "curriculum/in_band": fits / count,
            "curriculum/band_episodes": sum(len(part.band) for part in self._parts.values()),
            "curriculum/episodes": sum(len(part.first) for part in self._parts.values()),
            **self._figures_of_parts(),
        }

    def _figures_of_parts(self) -> dict[str, float]:
        if len(self._parts) == 1:
            return {}
        weights = {name: part.weight for name, part in self._parts.items()}
        total = sum(weights.values())
        found = {f"curriculum/weight/{name}": weight / total for name, weight in weights.items()}
        for name, part in self._parts.items():
            if part.success is not None:
                found[f"curriculum/success/{name}"] = part.success
        return found

    def _learn(self, version: int) -> None:
        """Take in the results of the steps that made this version."""
        while self._waiting and self._waiting[0][0] < version:
            _, results = self._waiting.popleft()
            for one in results:
                task, own = self._episodes.locate(one.episode)
                self._parts[task].measure(own, one)
                self._choices.pop(one.group_id, None)

    def _drawn(self, draw: float) -> "_Part":
        """Return the task at this place, between 0 and 1, of all weights laid end to end."""
        parts = list(self._parts.values())
        rest = draw * sum(part.weight for part in parts)
        for part in parts[:-1]:
            rest -= part.weight
            if rest < 0:
                return part
        return parts[-1]


@dataclass
class _Part:
    """What is known of one task's episodes; those of equal number in a finite task are the same."""

    source: TaskSource
    config: CurriculumConfig
    next_new: int = 0
    """The first episode of this island's share that no group has been given."""
    every: int = 1
    """Distance between two episodes of the share."""
    first: dict[int, int] = field(default_factory=dict)
    """The first group of each episode that was given to one."""
    band: dict[int, int] = field(default_factory=dict)
    """Episodes in the band by number, the one played longest ago first."""

    def __post_init__(self) -> None:
        self._ahead: set[int] = set()
        self._under_way: dict[int, int] = {}
        self._recent: deque[GroupResult] = deque(maxlen=self.config.window)

    @property
    def success(self) -> float | None:
        """Success of the latest groups; None before the first."""
        samples = sum(one.samples for one in self._recent)
        return sum(one.successes for one in self._recent) / samples if samples else None

    @property
    def weight(self) -> float:
        """The task's weight times how near its success is to the band."""
        success = self.success
        fit = 1.0 if success is None else self.config.fit(success)
        return self.source.weight * max(self.config.explore, fit)

    def take(self, own: int, group_id: int) -> None:
        """Record that a group plays this episode."""
        number = self._number(own)
        self.first[number] = min(group_id, self.first.get(number, group_id))
        self._under_way[group_id] = number
        if own >= self.next_new:
            self._ahead.add(own)
        while self.next_new in self._ahead:
            self._ahead.remove(self.next_new)
            self.next_new += self.every

    def measure(self, own: int, result: GroupResult) -> None:
        """Take in what a group has measured."""
        number = self._number(own)
        self._under_way.pop(result.group_id, None)
        self._recent.append(result)
        self.band.pop(number, None)
        if self.config.holds(result.successes, result.samples):
            self.band[number] = own

    def in_band(self, group_id: int) -> int | None:
        """Return the episode in the band that was played longest ago, and by no group before this
        one that is under way; None if there is none."""
        busy = {number for group, number in self._under_way.items() if group < group_id}
        return next((own for number, own in self.band.items() if number not in busy), None)

    def is_first(self, own: int, group_id: int) -> bool:
        """Whether no group before this one was given the episode."""
        return self.first.get(self._number(own)) == group_id

    def _number(self, own: int) -> int:
        return own if self.source.size is None else own % self.source.size
