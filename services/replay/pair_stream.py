"""Channel 3, concurrent with the steps: finished groups go in, pairs come out at each step.

    begin(group) -> choose states, query teachers -> filters -> reference -> store -> take(step)

Everything happens in order of group ids, whichever group finishes or is answered first: novelty,
duplicates and sums of dollars are then the same in every repetition, offline, and after a restart.
Groups that a step passes over leave this order, and are queried about once they have finished.
`take` waits for the step's own groups, or, where pairs may be late, does not wait.

Refines pairs before training: quality filters, then reference log-probs, once per pair.

Stateful, because duplicates are found across calls: pairs must come in the order of their groups.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from composer_mesh.channels.replay import pair_samples
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import (
    PreferencePair,
)
from composer_mesh.rollouts.state_choice import (
    NOTHING,
)
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.replay.teacher_queries import (
    Replay,
    TeacherQueryRecord,
    query_record_to_json,
    replay_of,
)
from composer_mesh.services.steps.ports import Reference, Teachers
from composer_mesh.services.steps.step_manifest import ReplayOutcome

TOO_LONG = "too_long"
"""Name of the built-in filter for pairs that exceed the policy's context."""

Encode = Callable[[Sequence[PreferencePair]], list[PairSample]]


@dataclass
class Refined:
    """Pairs that are fit for training, and how many each filter dropped."""

    pairs: list[PreferencePair]
    dropped: Counter[str]


class Refining:
    """Filters and scores pairs; `reference` is None where the loss needs none.

    `encode` tokenizes pairs and leaves out those that are too long.
    """

    def __init__(self, filters: PairFilters, encode: Encode, reference: Reference | None) -> None:
        self._filters, self._encode, self._reference = filters, encode, reference

    def remember(self, candidates: Sequence[PreferencePair]) -> None:
        """Replay to the filters the pairs that an earlier process passed to them, in the same
        order."""
        self._filters.keep(candidates)

    async def refine(self, pairs: Sequence[PreferencePair]) -> Refined:
        """Filter and score pairs. Waits for the reference. Calls must not overlap: filters are
        stateful."""
        # In a thread: near-duplicate detection is CPU-bound, and the event loop serves every
        # rollout.
        filtered = await asyncio.to_thread(self._filters.keep, pairs)
        dropped = Counter(filtered.dropped)
        samples = self._encode(filtered.kept)
        fitting = {sample.pair_id for sample in samples}
        kept = [pair for pair in filtered.kept if pair.pair_id in fitting]
        if too_long := len(filtered.kept) - len(kept):
            dropped[TOO_LONG] = too_long
        if self._reference is None or not kept:
            return Refined(kept, dropped)
        scores = await self._reference.score(samples)
        scored = zip(kept, scores, strict=True)
        return Refined([replace(pair, reference=score) for pair, score in scored], dropped)


MOST_BACKLOG = 2
"""A step trains at most this many times the number of pairs that it could have produced itself."""


class PairStore(Protocol):
    """Stores pairs until a step takes them; durable when a call returns."""

    async def add_teacher_queries(
        self, group_id: int, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]: ...

    async def take_pairs(
        self, step: int, max_age: int, limit: int
    ) -> tuple[list[PreferencePair], int]: ...


@dataclass
class TakenPairs:
    """Pairs for one step to train on, and the replay outcome since the previous step.

    `expired` pairs came too late to train, `waiting` ones are left for the next step. `saved_usd`
    estimates what the skipped states would have cost. The first `asked` groups of the run are
    accounted for, in this step or earlier.
    """

    pairs: list[PreferencePair]
    replay_outcome: ReplayOutcome
    expired: int = 0
    waiting: int = 0
    usd_total: float = 0.0
    saved_usd: float = 0.0
    asked: int = 0


@dataclass(frozen=True)
class _Asking:
    """A group with teacher queries in flight."""

    group_id: int
    situations: list[str]
    answers: asyncio.Task[ReplayOutcome]


class PairStream:
    """The pair pipeline of one run, on one event loop.

    `waiting` returns the number of stored pairs that no step has taken.
    """

    def __init__(
        self,
        replay: Replay,
        refining: Refining,
        store: PairStore,
        waiting: Callable[[], int],
        config: Config,
    ) -> None:
        self._replay, self._refining = replay, refining
        self._store, self._waiting = store, waiting
        self._config, self._waits = config.replay, config.pairs_wait
        self._finished: dict[int, Sequence[Trace]] = {}
        self._passed: set[int] = set()
        self._next = self._refined = 0
        self._asking: deque[_Asking] = deque()
        self._begun, self._draining = asyncio.Event(), False
        self._worker: asyncio.Task[None] | None = None
        self._since = ReplayOutcome()
        self._states, self._usd = 0, 0.0

    def restore(
        self, queried: Iterable[TeacherQueryRecord], taken: int, carried: Iterable[int] = ()
    ) -> int:
        """Restore the queries of an earlier process of the run; return the first group not queried.

        Groups come in order of their ids. The first `taken` groups were accounted for in a step;
        from the first missing group on, other than those `carried`, groups are queried again.
        """
        self._passed = set(carried)
        for group in queried:
            while self._next < group.group_id and self._next in self._passed:
                self._next += 1
            if group.group_id != self._next:
                break
            self._passed.discard(self._next)
            self._replay.restore(group.situations)
            self._refining.remember(group.candidates)
            self._next = self._refined = self._next + 1
            self._count(group.replay_outcome)
            if group.group_id < taken:
                self._since = ReplayOutcome()
        self._advance()
        return self._next

    def begin(self, group: Sequence[Trace]) -> None:
        """Query teachers about a finished group once all groups before it are finished too."""
        self._enter(group[0].group_id, group)

    def skip(self, group_id: int) -> None:
        """Register a group without rollouts, so that the groups after it do not wait for it."""
        self._enter(group_id, [])

    def pass_over(self, group_ids: Iterable[int]) -> None:
        """Let no group wait for these unfinished ones, which may be named repeatedly."""
        self._passed.update(group_ids)
        self._advance()

    def _enter(self, group_id: int, group: Sequence[Trace]) -> None:
        if group_id in self._passed:
            self._passed.remove(group_id)
            self._ask(group_id, group)
        elif group_id < self._next:
            return  # an earlier process of the run has queried about it
        else:
            self._finished[group_id] = group
        self._advance()

    def _ask(self, group_id: int, group: Sequence[Trace]) -> None:
        selection = self._replay.choose(group) if group else NOTHING
        situations = [state.situation for state in selection.planned]
        answers = asyncio.create_task(self._replay.ask_about(selection))
        self._asking.append(_Asking(group_id, situations, answers))

    def _advance(self) -> None:
        """Query about the finished groups that wait for none."""
        while self._next in self._passed or self._next in self._finished:
            if self._next in self._finished:
                self._ask(self._next, self._finished.pop(self._next))
            self._next += 1
        self._begun.set()
        if not self._waits and self._worker is None:
            self._worker = asyncio.create_task(self._work())

    async def take(self, step: int, groups: int) -> TakenPairs:
        """Return the step's pairs. Waits for those of its own groups, unless pairs may be late.

        The steps up to this one have taken groups before `groups`, and all of them that have
        finished. The returned pairs count as taken once the step is planned.
        """
        while self._waits and any(asking.group_id < groups for asking in self._asking):
            await self._refine()
        self._raise_failure()
        # Late pairs may arrive in a burst: the excess waits, so that no step consists of pairs
        # only.
        limit = MOST_BACKLOG * self._config.states_per_step
        since, queried, usd, states = self._since, self._refined, self._usd, self._states
        self._since = ReplayOutcome()
        pairs, expired = await self._store.take_pairs(step, self._config.max_age, limit)
        waiting = self._waiting() - len(pairs) - expired
        saved = since.saved * (usd / states if states else 0.0)
        return TakenPairs(pairs, since, expired, waiting, usd, saved, queried)

    async def drain(self) -> ReplayOutcome:
        """Wait for all queries in flight; return their outcome since the last step.

        The pairs are stored, but no step is left to train them.
        """
        self._draining = True
        self._begun.set()
        if self._worker is not None:
            await asyncio.shield(self._worker)
        while self._asking:
            await self._refine()
        since, self._since = self._since, ReplayOutcome()
        return since

    async def close(self) -> None:
        """Stop querying; what is in flight is cancelled."""
        worker = [self._worker] if self._worker is not None else []
        await cancel_and_wait([*worker, *(asking.answers for asking in self._asking)])

    async def _work(self) -> None:
        while not self._draining:
            await self._begun.wait()
            self._begun.clear()
            while self._asking:
                await self._refine()

    async def _refine(self) -> None:
        """Turn the oldest group's answers into stored pairs. Calls must not overlap."""
        asking = self._asking[0]
        replay_outcome = await asyncio.shield(asking.answers)
        refined = await self._refining.refine(replay_outcome.pairs)
        replay_outcome.dropped += refined.dropped
        record = TeacherQueryRecord(
            asking.group_id, asking.situations, replay_outcome, list(replay_outcome.pairs)
        )
        body = query_record_to_json(record, refined.pairs)
        await self._store.add_teacher_queries(asking.group_id, body, refined.pairs)
        self._asking.popleft()
        replay_outcome.pairs = []
        self._refined = max(self._refined, asking.group_id + 1)
        self._count(replay_outcome)

    def _count(self, replay_outcome: ReplayOutcome) -> None:
        self._since += replay_outcome
        self._states += replay_outcome.states
        self._usd += replay_outcome.usd

    def _raise_failure(self) -> None:
        if self._worker is not None and self._worker.done() and not self._worker.cancelled():
            self._worker.result()


def make_pair_stream(
    config: Config,
    teachers: Teachers,
    reference: Reference | None,
    chat: ChatFormat,
    store: PairStore,
    waiting: Callable[[], int],
) -> PairStream:
    """Build the pair stream of a run from its config; `waiting` counts the pairs not yet taken."""
    encode = partial(pair_samples, chat=chat, max_context=config.policy.max_context)
    refining = Refining(PairFilters(config.replay.filters), encode, reference)
    return PairStream(replay_of(config, teachers), refining, store, waiting, config)
