"""Groups on their way: what is stored of them from before is taken as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from controller_world import World, rollouts_of

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import WrittenHint
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.schedule.groups import Groups, StoredGroup, first_to_finish
from composer_mesh.services.schedule.step_builder import Group
from composer_mesh.services.steps.hint_writing import HintWriting, WrittenHints
from composer_mesh.tasks.toolbox import ToolboxTask

WORDS = WrittenHints({("train-000001-000", 0): WrittenHint("Look.", "llm")}, 1, 0.5)


class Keeping(World):
    """A store that has groups from before, and a hint writer that counts its questions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: dict[int, list[Trace]] = {}
        self.questions = 0

    async def add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]:
        return self.kept.setdefault(group_id, list(traces))

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        self.questions += len(requests)
        return [HintReply("Look again.", "llm", sent=True) for _ in requests]

    def sampled(self) -> set[int]:
        """The groups that were sampled."""
        return {int(session.split("-")[1]) for session in self.names("begin")}


@pytest.fixture
def world(tokenizer: Any, toolbox: ToolboxTask) -> Keeping:
    return Keeping(toolbox, ChatFormat(tokenizer, toolbox.tools), error_rate=1.0)


@pytest.fixture
def config_of(build_config: Any) -> Any:
    def build(max_lag: int, **more: Any) -> Config:
        hints = {"writer": "llm", "llm": {"kind": "builtin"}}
        schedule = {"prompts_per_step": 2, "group_size": 2, "max_lag": max_lag, **more}
        return build_config(schedule=schedule, sdpo={"alpha": 0.1, "hints": hints})

    return build


async def collected(
    world: Keeping,
    config: Config,
    stored: dict[int, StoredGroup],
    on_drop: Callable[[int], None] = lambda _: None,
) -> list[Group]:
    hints = HintWriting(world, config, world.task, world.chat, lambda _: None)
    ports = (rollouts_of(world, config), world, None, hints)
    groups = Groups(config, world.task, *ports, stored, on_drop=on_drop)
    groups.enter([0, 1], 0)
    try:
        return await groups.collect(2)
    finally:
        await groups.close()


def marked(traces: Sequence[Trace]) -> list[Trace]:
    """The same rollouts with a reward that nobody would give again."""
    return [replace(trace, reward=0.123) for trace in traces]


async def test_a_stored_group_is_neither_sampled_nor_worded_again(
    world: Keeping, config_of: Any
) -> None:
    first, second = await collected(world, config_of(1), {})
    asked, traces = world.questions, marked(second.traces)
    assert asked > 0
    world.done.clear()
    world.kept.clear()
    again = await collected(world, config_of(1), {1: StoredGroup(traces, WORDS)})
    assert world.sampled() == {0}
    assert again == [first, Group(1, traces, WORDS)]
    assert world.questions - asked < asked


async def test_where_a_group_of_a_closed_batch_is_missing_all_are_sampled_and_the_stored_ones_win(
    world: Keeping, config_of: Any
) -> None:
    _, second = await collected(world, config_of(0), {})
    traces = marked(second.traces)
    world.done.clear()
    world.kept = {1: traces}
    again = await collected(world, config_of(0), {1: StoredGroup(traces, WORDS)})
    assert world.sampled() == {0, 1}
    assert again[1] == Group(1, traces, WORDS)


async def test_where_all_groups_of_a_closed_batch_are_stored_none_is_sampled(
    world: Keeping, config_of: Any
) -> None:
    groups = await collected(world, config_of(0), {})
    world.done.clear()
    stored = {group.group_id: StoredGroup(group.traces, group.worded) for group in groups}
    assert await collected(world, config_of(0), stored) == groups
    assert world.sampled() == set()


async def test_a_stored_group_that_nobody_worded_is_worded_now(
    world: Keeping, config_of: Any
) -> None:
    groups = await collected(world, config_of(1), {})
    stored = {group.group_id: StoredGroup(group.traces) for group in groups}
    assert await collected(world, config_of(1), stored) == groups


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_group_with_equal_rewards_is_reported_and_not_worded_where_groups_are_dropped(
    world: Keeping, config_of: Any, max_lag: int
) -> None:
    _, second = await collected(world, config_of(max_lag), {})
    stored = {1: StoredGroup(marked(second.traces))}
    world.kept, before, dropped = {1: stored[1].traces}, world.questions, list[int]()
    first, again = await collected(
        world, config_of(max_lag, dynamic_sampling=True), stored, dropped.append
    )
    assert again == Group(1, stored[1].traces, WrittenHints())
    assert sorted(dropped) == ([0, 1] if equal_rewards(first.traces) else [1])
    assert world.questions - before == first.worded.requests


def trace_of(sample: int) -> Trace:
    return Trace(f"t-{sample}", 0, sample, "t", "train", 0, [], [], 0.0, False, [])


class Rollout:
    """A sample that ends when it is told to."""

    def __init__(self, sample: int) -> None:
        self.sample, self.ended = sample, asyncio.Event()
        self.given_up = self.fails = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Trace | None:
        await self.ended.wait()
        if self.fails:
            raise ValueError(f"sample {self.sample}")
        return None if self.given_up else trace_of(self.sample)


async def first_of(rollouts: list[Rollout], order: list[int]) -> tuple[list[Trace], int]:
    """Wait for the first three, which end in this order."""
    waiting = asyncio.create_task(first_to_finish([one.task for one in rollouts], 3))
    for sample in order:
        rollouts[sample].ended.set()
        for _ in range(5):
            await asyncio.sleep(0)
    return await waiting


async def test_the_first_samples_to_finish_make_the_group_and_the_others_are_cancelled() -> None:
    rollouts = [Rollout(sample) for sample in range(5)]
    traces, cancelled = await first_of(rollouts, [4, 0, 3])
    assert [trace.sample for trace in traces] == [0, 3, 4]
    assert cancelled == 2
    assert all(rollouts[sample].task.cancelled() for sample in (1, 2))


async def test_a_spare_sample_replaces_one_that_is_given_up() -> None:
    rollouts = [Rollout(sample) for sample in range(5)]
    rollouts[4].given_up = True
    traces, cancelled = await first_of(rollouts, [4, 0, 3, 1])
    assert [trace.sample for trace in traces] == [0, 1, 3]
    assert cancelled == 1


async def test_a_group_is_smaller_where_too_many_samples_are_given_up() -> None:
    rollouts = [Rollout(sample) for sample in range(5)]
    for sample in (0, 2, 4):
        rollouts[sample].given_up = True
    traces, cancelled = await first_of(rollouts, [0, 1, 2, 3, 4])
    assert ([trace.sample for trace in traces], cancelled) == ([1, 3], 0)


async def test_a_sample_that_fails_permanently_cancels_the_others() -> None:
    rollouts = [Rollout(sample) for sample in range(5)]
    rollouts[2].fails = True
    with pytest.raises(ValueError, match="sample 2"):
        await first_of(rollouts, [0, 2])
    await asyncio.wait([one.task for one in rollouts])
    assert all(rollouts[sample].task.cancelled() for sample in (1, 3, 4))


class Gated:
    """Rollouts of groups that end when they are told to, and a store that keeps nothing."""

    def __init__(self) -> None:
        self.ended: dict[int, Rollout] = {}

    def start(self, _episode: Any, group: int, size: int, _: Any) -> list[asyncio.Task[Any]]:
        assert size == 2
        self.ended[group] = Rollout(group)
        return [self.ended[group].task]

    async def comparable(self, _: Any, traces: list[Trace]) -> list[Trace]:
        return traces

    def enter(self, group_id: int, version: int) -> None: ...

    async def add_group(self, _: int, traces: Sequence[Trace]) -> list[Trace]:
        return list(traces)

    async def end(self, *groups: int) -> None:
        for group in groups:
            self.ended[group].ended.set()
        for _ in range(9):
            await asyncio.sleep(0)


@asynccontextmanager
async def gated(build_config: Any, carried: int, entered: int) -> AsyncIterator[tuple[Any, Groups]]:
    schedule = {"prompts_per_step": 2, "group_size": 2, "max_lag": 1, "carried_groups": carried}
    world: Any = Gated()
    task: Any = SimpleNamespace(pick=lambda split, index: (split, index))
    groups = Groups(build_config(schedule=schedule), task, world, world, None, None, {})
    groups.enter(range(entered), 0)
    try:
        yield world, groups
    finally:
        await groups.close()


async def ids_of(collecting: asyncio.Task[list[Group]]) -> list[int]:
    return [group.group_id for group in await collecting]


async def test_unfinished_groups_are_passed_over_and_collected_first_once_they_have_finished(
    build_config: Any,
) -> None:
    async with gated(build_config, carried=2, entered=6) as (world, groups):
        first = asyncio.create_task(groups.collect(2))
        await world.end(3, 1)
        assert await ids_of(first) == [1, 3]
        assert list(groups.running) == [0, 2, 4, 5]
        second = asyncio.create_task(groups.collect(2))
        await world.end(5)
        assert not second.done(), "it would pass over three groups"
        await world.end(2)
        assert await ids_of(second) == [2, 5]
        third = asyncio.create_task(groups.collect(1))
        await asyncio.sleep(0)
        groups.enter([6], 1)
        await world.end(6)
        assert await ids_of(third) == [6], "one that entered meanwhile"


async def test_without_carried_groups_they_are_collected_in_order_of_entry(
    build_config: Any,
) -> None:
    async with gated(build_config, carried=0, entered=3) as (world, groups):
        collecting = asyncio.create_task(groups.collect(2))
        await world.end(1, 2)
        assert not collecting.done()
        await world.end(0)
        assert await ids_of(collecting) == [0, 1]


async def test_a_group_that_fails_ends_the_collection_also_where_it_could_be_passed_over(
    build_config: Any,
) -> None:
    async with gated(build_config, carried=2, entered=4) as (world, groups):
        world.ended[1].fails = True
        collecting = asyncio.create_task(groups.collect(2))
        await world.end(2, 1)
        with pytest.raises(ValueError, match="sample 1"):
            await collecting
