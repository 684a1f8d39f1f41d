"""Channel 3 beside the steps: in the groups' order whatever overtakes what, and in nobody's way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.filters import ExactDuplicatesFilter
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
from composer_mesh.rollouts.toolbox import ToolboxTask
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.asking import Replay
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.replay.pair_stream import HEAP, PairStream
from composer_mesh.services.replay.refining import TOO_LONG, Refining

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
    opening = task.session(task.episode("train", group)).messages
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


@pytest.fixture
def config_of(build_config: Any) -> Callable[..., Config]:
    def build(delivery: str, max_age: int = 8) -> Config:
        return build_config(
            run={"name": "unit", "seed": 3, "steps": STEPS},
            schedule={"prompts_per_step": PROMPTS, "group_size": 2, "max_lag": 1},
            replay={
                "beta": 0.3,
                "ask": 2,
                "states_per_step": 2 * PROMPTS,
                "teachers": TEACHERS,
                "delivery": delivery,
                "max_age": max_age,
            },
        )

    return build


@dataclass
class Running:
    stream: PairStream
    store: LateStore
    kept: list[PreferencePair]


@asynccontextmanager
async def running(world: World, config: Config, folder: Path) -> AsyncIterator[Running]:
    kept: list[PreferencePair] = []
    filters = PairFilters([ExactDuplicatesFilter(type="exact_duplicates")])
    with closing(LateStore(folder / LATE_FILE)) as store:
        replay = Replay(world, config.replay, PROMPTS, config.run.seed)
        stream = PairStream(replay, Refining(filters, encode, world), store, config, kept.extend)
        try:
            yield Running(stream, store, kept)
        finally:
            await stream.close()


def ids(pairs: Sequence[PreferencePair]) -> list[str]:
    return [pair.pair_id for pair in pairs]


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is true; filters work in threads, so turns are not counted."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what is awaited is a row of a file
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(4))
async def test_a_step_that_waits_gets_the_pairs_of_its_own_groups_in_their_order(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path, seed: int
) -> None:
    world = World(toolbox, seed)
    async with running(world, config_of("same_step"), tmp_path) as run:
        order = list(range(PROMPTS * STEPS))
        random.Random(seed).shuffle(order)
        for group in order:
            run.stream.begin(group_of(toolbox, group))
        for step in range(STEPS):
            taken = await run.stream.take(step)
            groups = [int(pair.trace_id.split("-")[1]) for pair in taken.pairs]
            assert groups == [
                PROMPTS * step,
                PROMPTS * step,
                PROMPTS * step + 1,
                PROMPTS * step + 1,
            ]
            assert taken.replayed.states == 2 * PROMPTS
            assert taken.replayed.failures == {"rate": 2 * PROMPTS}
            assert taken.replayed.usd == pytest.approx(0.52 * 2 * PROMPTS)
        assert taken.usd_total == pytest.approx(0.52 * 2 * PROMPTS * STEPS)
        assert world.scored == [ids(run.kept[4 * step : 4 * step + 4]) for step in range(STEPS)]


async def test_late_pairs_never_block_a_step_and_train_when_they_have_come(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    world = World(toolbox, held={"train-000001-000", "train-000001-001"})
    async with running(world, config_of("late"), tmp_path) as run:
        run.stream.begin(group_of(toolbox, 0))
        run.stream.begin(group_of(toolbox, 1))
        await until(lambda: run.store.waiting_pairs() == 2)
        first = await run.stream.take(0)
        assert {pair.trace_id for pair in first.pairs} == {"train-000000-000", "train-000000-001"}
        assert (await run.stream.take(1)).pairs == []
        world.go.set()
        await until(lambda: run.store.waiting_pairs() == 2)
        late = await run.stream.take(2)
        assert {pair.trace_id for pair in late.pairs} == {"train-000001-000", "train-000001-001"}
        assert all(
            pair.reference == (-1.0, -float(len(pair.chosen_text.encode()))) for pair in late.pairs
        )


async def test_a_pair_that_is_too_old_is_not_trained_but_kept(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    async with running(World(toolbox), config_of("late", max_age=2), tmp_path) as run:
        run.stream.begin(group_of(toolbox, 0, version=1))
        await until(lambda: run.store.waiting_pairs() == 2)
        taken = await run.stream.take(4)
        assert (taken.pairs, taken.expired, len(run.kept)) == ([], 2, 2)


async def test_a_heap_of_late_pairs_is_spread_over_steps(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    async with running(World(toolbox), config_of("late"), tmp_path) as run:
        for group in range(PROMPTS * STEPS):
            run.stream.begin(group_of(toolbox, group))
        await until(lambda: run.store.waiting_pairs() == 4 * STEPS)
        first = await run.stream.take(0)
        assert (len(first.pairs), first.waiting) == (HEAP * 2 * PROMPTS, 4)
        assert first.replayed.states == 12
        assert (await run.stream.take(1)).replayed.states == 0


async def test_pairs_that_wait_survive_a_restart_and_a_step_can_be_trained_again(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    config = config_of("late")
    async with running(World(toolbox), config, tmp_path) as run:
        run.stream.begin(group_of(toolbox, 0))
        await until(lambda: run.store.waiting_pairs() == 2)
        waiting = ids(run.kept)
    async with running(World(toolbox), config, tmp_path) as again:
        assert ids((await again.stream.take(0)).pairs) == waiting
        again.store.rewind(0)
        assert ids((await again.stream.take(0)).pairs) == waiting
        again.stream.begin(group_of(toolbox, 0))
        await until(lambda: again.stream._states > 0)
        assert (again.kept, again.store.waiting_pairs()) == ([], 0)


async def test_draining_waits_for_the_last_teachers(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    world = World(toolbox, held={"train-000000-000"})
    async with running(world, config_of("late"), tmp_path) as run:
        run.stream.begin(group_of(toolbox, 0))
        await run.stream.take(0)
        draining = asyncio.create_task(run.stream.drain())
        await until(lambda: len(world.asked) == 2)
        assert not draining.done()
        world.go.set()
        rest = await draining
        assert (rest.states, len(run.kept)) == (2, 2)


@pytest.mark.parametrize("delivery", ["late", "same_step"])
async def test_a_pool_that_is_lost_ends_the_run_at_its_next_step(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path, delivery: str
) -> None:
    world = World(toolbox, broken=True)
    async with running(world, config_of(delivery), tmp_path) as run:
        for group in range(PROMPTS):
            run.stream.begin(group_of(toolbox, group))
        with pytest.raises(Broken, match="train-000000-00"):  # noqa: PT012
            while True:
                await run.stream.take(0)
                await asyncio.sleep(0)


async def test_filters_and_the_context_drop_pairs_before_the_reference_sees_them(
    config_of: Any, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    world = World(toolbox)
    async with running(world, config_of("same_step"), tmp_path) as run:
        repeated = [replace(trace, group_id=1) for trace in group_of(toolbox, 0)]
        again = [replace(t, trace_id=f"train-000001-{n:03d}") for n, t in enumerate(repeated)]
        run.stream.begin(group_of(toolbox, 0))
        run.stream.begin(again)
        assert (await run.stream.take(0)).replayed.dropped["exact_duplicates"] == 2
        for group in (2, 3):
            run.stream.begin(group_of(toolbox, group, width=20))
        taken = await run.stream.take(1)
        assert taken.replayed.dropped[TOO_LONG] == 4
        assert taken.pairs == []
        assert [len(batch) for batch in world.scored] == [2]
