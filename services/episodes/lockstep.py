"""The rounds of a run in lockstep: each is a closed batch of every episode's next request.

    workers: names of waiting requests --> Rounds, until every announced episode has one
    workers <-- which generator takes which request ------- Rounds

The shares depend on the announced samples and on the number of generators, never on which worker
plays what: a run repeats bit for bit with any number of rollout workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from composer_mesh.actors.rollout_workers.lockstep import Round
from composer_mesh.rollouts.episode import Sample


class LockstepRounds:
    """Decides when a round is complete; `release` is called with each complete one."""

    def __init__(
        self, generators: Callable[[], Sequence[str]], release: Callable[[Round], None]
    ) -> None:
        """`generators` returns the names of those that serve, in the order of their slots."""
        self._generators, self._release = generators, release
        self._live: Counter[str] = Counter()
        self._places: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._waiting: dict[str, Sequence[str]] = {}
        self._begun = False
        """Whether the live episodes have had a round."""
        self.number = -1
        """Number of the last round."""

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        """Count samples as live from now on, until their contexts are left."""
        for sample in samples:
            self._live[sample.trace_id] += 1
            self._places[sample.trace_id] = len(self._places)
            self._groups.setdefault(sample.group, len(self._groups))
        return [self._counted(sample.trace_id) for sample in samples]

    def wait(self, worker: str, names: Sequence[str]) -> None:
        """Note all requests that wait at a worker, in place of those noted before."""
        self._waiting[worker] = names
        self.check()

    def lose(self, worker: str) -> None:
        """Forget what waits at a worker that is gone: its episodes begin again elsewhere."""
        self._waiting.pop(worker, None)
        self.check()

    @contextmanager
    def _counted(self, trace_id: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._live -= Counter([trace_id])
            if not self._live:
                self._begun = False
                self._places.clear()
                self._groups.clear()
            self.check()

    def check(self) -> None:
        """Release the round if it is complete; call it when a generator begins to serve too."""
        noted = [name for waiting in self._waiting.values() for name in waiting]
        names = [name for name in noted if _episode(name) in self._live]  # others were cancelled
        generators = self._generators()
        if names and generators and len(names) >= self._live.total():
            self._waiting.clear()
            self.number += 1
            shares = self._shares(sorted(names), generators)
            continues, self._begun = self._begun, True
            self._release(Round(self.number, continues, shares))

    def _shares(
        self, names: Sequence[str], generators: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Divide requests by groups, which have prompts in common, or singly where groups are few.

        An episode keeps its generator while the number of generators stays the same.
        """
        shares: dict[str, list[str]] = {}
        for name in names:
            episode = _episode(name)
            place = self._places[episode]
            if len(self._groups) >= len(generators):
                place = self._groups[episode.rpartition("-")[0]]
            shares.setdefault(generators[place % len(generators)], []).append(name)
        return shares


def _episode(request: str) -> str:
    """Return the trace id of a request's episode."""
    return request.rpartition("-")[0]
