"""Teachers, a reference and a store for a pair stream, as slow as a test wants them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from composer_mesh.configs.replay import ExactDuplicatesFilter
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    PreferencePair,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
)
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.pair_stream import PairStream, Refining, TakenPairs
from composer_mesh.services.replay.teacher_queries import Replay
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPTS, STEPS = 2, 3
TEACHERS = [{"name": name, "kind": "builtin"} for name in "ab"]


class Broken(Exception):
    """What a teacher's actor raises in these tests."""


@dataclass
class World:
    """Teachers and the reference, slow as a test wants them; `answered` is set to let them go."""

    task: ToolboxTask
    seed: int = 0
    held: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    scored: list[list[str]] = field(default_factory=list)
    broken: bool = False

    def __post_init__(self) -> None:
        self.go, self.rng = asyncio.Event(), random.Random(self.seed)

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.asked.append(state.state_id)
        if self.broken:
            raise Broken(state.state_id)
        for _ in range(self.rng.randrange(9)):
            await asyncio.sleep(0)
        if state.state_id.rpartition("/")[0] in self.held:
            await self.go.wait()
        text = self.task.expert(state.messages)
        said = assistant_message(text, "call")
        replies: list[TeacherReply] = [
            TeacherAnswer(name, text, said, 0.01, True, 0.1) for name in "ab"[:n]
        ]
        return [*replies, TeacherFailure("c", FailureKind.RATE, "slow down", 0.1, usd=0.5)]

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]:
        self.scored.append([sample.pair_id for sample in samples])
        return [(-1.0, -float(len(sample.chosen_ids))) for sample in samples]


def encode(pairs: Sequence[PreferencePair]) -> list[PairSample]:
    """Ids by the letter; a context of more than nine ids is too long."""
    return [
        PairSample(p.pair_id, p.context_ids, list(p.chosen_text.encode()), p.rejected_ids)
        for p in pairs
        if len(p.context_ids) < 10
    ]


def group_of(task: ToolboxTask, group: int, version: int = 0, width: int = 4) -> list[Trace]:
    """One episode, given up at once by each of two samples."""
    opening = SyncSession(task, task.episode("train", group)).messages
    return [
        Trace(
            f"train-{group:06d}-{sample:03d}",
            group,
            sample,
            "toolbox",
            "train",
            group,
            [Turn([group] * width + [sample], [5, 6], [-0.5] * 2, [version] * 2, "stop")],
            [*opening, {"role": "assistant", "content": f"I give up, says {sample}."}],
            0.0,
            False,
            [],
        )
        for sample in range(2)
    ]


@dataclass
class Store:
    """A run's store as a stream sees it; it outlives streams, as a file does."""

    asked: dict[int, bytes] = field(default_factory=dict)
    kept: list[PreferencePair] = field(default_factory=list)
    waiting: list[PreferencePair] = field(default_factory=list)

    async def add_teacher_queries(
        self, group_id: int, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]:
        self.asked[group_id] = body
        known = {pair.pair_id for pair in self.kept}
        fresh = [pair for pair in pairs if pair.pair_id not in known]
        self.kept += fresh
        self.waiting += fresh
        return fresh

    async def take_pairs(
        self, step: int, max_age: int, limit: int
    ) -> tuple[list[PreferencePair], int]:
        young = [pair for pair in self.waiting if step - pair.rejected_version <= max_age]
        return young[:limit], len(self.waiting) - len(young)

    def plan(self, taken: TakenPairs) -> TakenPairs:
        """What planning a step does to the pairs that it takes; those too old are left here."""
        self.waiting = [pair for pair in self.waiting if pair not in taken.pairs]
        return taken


@dataclass
class Running:
    stream: PairStream
    store: Store

    @property
    def kept(self) -> list[PreferencePair]:
        return self.store.kept

    async def take(self, step: int) -> TakenPairs:
        """The pairs of a step that is planned with them."""
        return await self.take_before(step, (step + 1) * PROMPTS)

    async def take_before(self, step: int, groups: int) -> TakenPairs:
        """The same where the steps so far have taken groups before this one."""
        return self.store.plan(await self.stream.take(step, groups))


@asynccontextmanager
async def running(
    world: World, config: Config, store: Store | None = None
) -> AsyncIterator[Running]:
    kept = store or Store()
    filters = PairFilters([ExactDuplicatesFilter(type="exact_duplicates")])
    replay = Replay(world, config.replay, PROMPTS, config.run.seed)
    refining = Refining(filters, encode, world)
    stream = PairStream(replay, refining, kept, lambda: len(kept.waiting), config)
    try:
        yield Running(stream, kept)
    finally:
        await stream.close()


def ids(pairs: Sequence[PreferencePair]) -> list[str]:
    return [pair.pair_id for pair in pairs]


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is true; filters work in threads, so turns are not counted."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  what is awaited is a row of a file
            await asyncio.sleep(0.001)
