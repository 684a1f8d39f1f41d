"""Channel 3 beside the steps: groups go in as they finish, pairs come out at each step.

    begin(group) -> choose states, ask teachers -> filters -> reference -> late store -> take(step)

Everything happens in the order of the groups' ids, whoever finishes or answers first: what is novel
and what is a duplicate is then the same in each repetition, and offline. `take` waits for the
step's own groups, or, where pairs may be late, for nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.replay.asking import Replay, Replayed
from composer_mesh.services.replay.late_store import LateStore
from composer_mesh.services.replay.refining import Refining

Keep = Callable[[Sequence[PreferencePair]], None]

HEAP = 2
"""A step trains at most this many times the pairs that it could have made itself."""

NOTHING = Selection([], [], skipped=0, distinct=0, saved=0)


@dataclass
class Taken:
    """What one step gets: pairs to train, and what asking came to since the step before.

    `expired` pairs came too late to train, `waiting` ones are left for the next step. `saved_usd`
    estimates what the skipped states would have cost.
    """

    pairs: list[PreferencePair]
    replayed: Replayed
    expired: int = 0
    waiting: int = 0
    usd_total: float = 0.0
    saved_usd: float = 0.0


class PairStream:
    """Belongs to one event loop and one run. `keep` makes finished pairs durable for people.

    The groups of the first `start` steps were asked about before.
    """

    def __init__(
        self,
        replay: Replay,
        refining: Refining,
        store: LateStore,
        config: Config,
        keep: Keep,
        start: int = 0,
    ) -> None:
        self._replay, self._refining, self._store, self._keep = replay, refining, store, keep
        self._config, self._waits = config.replay, config.pairs_wait
        self._prompts = config.schedule.prompts_per_step
        self._finished: dict[int, Sequence[Trace]] = {}
        self._next = start * self._prompts
        self._asking: deque[asyncio.Task[Replayed]] = deque()
        self._begun, self._draining = asyncio.Event(), False
        self._worker: asyncio.Task[None] | None = None
        self._since = Replayed()
        self._states, self._usd = 0, 0.0

    def begin(self, group: Sequence[Trace]) -> None:
        """Ask about a finished group as soon as all groups before it are finished too."""
        self._enter(group[0].group_id, group)

    def skip(self, group_id: int) -> None:
        """A group without rollouts has nothing to ask about, and holds up none after it."""
        self._enter(group_id, [])

    def _enter(self, group_id: int, group: Sequence[Trace]) -> None:
        self._finished[group_id] = group
        while self._next in self._finished:
            following = self._finished.pop(self._next)
            selection = self._replay.choose(following) if following else NOTHING
            self._asking.append(asyncio.create_task(self._replay.ask_about(selection)))
            self._next += 1
        self._begun.set()
        if not self._waits and self._worker is None:
            self._worker = asyncio.create_task(self._work())

    async def take(self, step: int) -> Taken:
        """The step's pairs. Waits for those of its own groups, or for nothing where late."""
        if self._waits:
            await self._refine(self._prompts)
        self._raise_failure()
        # Late pairs may come in a heap: the rest of it waits, so that no step is all pairs.
        limit = HEAP * self._config.states_per_step
        pairs, expired = self._store.take_pairs(step, self._config.max_age, limit)
        since, self._since = self._since, Replayed()
        return self._taken(pairs, expired, since)

    async def drain(self) -> Replayed:
        """Wait for all that is asked; returns what it came to since the last step took.

        The pairs are kept, but no step is left to train them.
        """
        self._draining = True
        self._begun.set()
        if self._worker is not None:
            await asyncio.shield(self._worker)
        await self._refine(len(self._asking))
        since, self._since = self._since, Replayed()
        return since

    async def close(self) -> None:
        """Ask nothing more; what is under way is cancelled."""
        worker = [self._worker] if self._worker is not None else []
        await cancel_and_wait([*worker, *self._asking])

    async def _work(self) -> None:
        while not self._draining:
            await self._begun.wait()
            self._begun.clear()
            while self._asking:
                await asyncio.wait([self._asking[0]])
                await self._refine(self._answered())

    def _answered(self) -> int:
        """How many groups, from the oldest, have all their answers."""
        for count, asking in enumerate(self._asking):
            if not asking.done():
                return count
        return len(self._asking)

    async def _refine(self, groups: int) -> None:
        """Make the oldest groups' pairs ready for a step. Calls must not overlap."""
        replayed = Replayed()
        for asking in list(self._asking)[:groups]:
            replayed += await asyncio.shield(asking)
        refined = await self._refining.refine(replayed.pairs)
        for _ in range(min(groups, len(self._asking))):
            self._asking.popleft()
        self._keep(self._store.add_pairs(refined.pairs))
        replayed.dropped += refined.dropped
        replayed.pairs = []
        self._since += replayed
        self._states += replayed.states
        self._usd += replayed.usd

    def _taken(self, pairs: list[PreferencePair], expired: int, since: Replayed) -> Taken:
        mean = self._usd / self._states if self._states else 0.0
        waiting = self._store.waiting_pairs()
        return Taken(pairs, since, expired, waiting, self._usd, mean * since.saved)

    def _raise_failure(self) -> None:
        if self._worker is not None and self._worker.done() and not self._worker.cancelled():
            self._worker.result()
