"""Channel 3 beside the steps: in the groups' order whatever overtakes what, and in nobody's way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from pair_streams import (
    PROMPTS,
    STEPS,
    TEACHERS,
    Broken,
    Running,
    Store,
    World,
    group_of,
    ids,
    running,
    until,
)

from composer_mesh.configs.schema import Config
from composer_mesh.services.replay.pair_stream import MOST_BACKLOG, TOO_LONG
from composer_mesh.services.replay.teacher_queries import query_record_from_json
from composer_mesh.tasks.toolbox import ToolboxTask


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


@pytest.mark.parametrize("seed", range(4))
async def test_a_step_that_waits_gets_the_pairs_of_its_own_groups_in_their_order(
    config_of: Any, toolbox: ToolboxTask, seed: int
) -> None:
    world = World(toolbox, seed)
    async with running(world, config_of("same_step")) as run:
        order = list(range(PROMPTS * STEPS))
        random.Random(seed).shuffle(order)
        for group in order:
            run.stream.begin(group_of(toolbox, group))
        for step in range(STEPS):
            taken = await run.take(step)
            groups = [int(pair.trace_id.split("-")[1]) for pair in taken.pairs]
            assert groups == [
                PROMPTS * step,
                PROMPTS * step,
                PROMPTS * step + 1,
                PROMPTS * step + 1,
            ]
            assert taken.replay_outcome.states == 2 * PROMPTS
            assert taken.replay_outcome.failures == {"rate": 2 * PROMPTS}
            assert taken.replay_outcome.failed_by == {"rate/c": 2 * PROMPTS}
            assert taken.replay_outcome.reasons == {"rate/c": "slow down"}
            assert taken.replay_outcome.usd == pytest.approx(0.52 * 2 * PROMPTS)
        assert taken.usd_total == pytest.approx(0.52 * 2 * PROMPTS * STEPS)
        groups = range(PROMPTS * STEPS)
        assert world.scored == [ids(run.kept[2 * n : 2 * n + 2]) for n in groups]


async def test_late_pairs_never_block_a_step_and_train_when_they_have_come(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    world = World(toolbox, held={"train-000001-000", "train-000001-001"})
    async with running(world, config_of("late")) as run:
        run.stream.begin(group_of(toolbox, 0))
        run.stream.begin(group_of(toolbox, 1))
        await until(lambda: len(run.store.waiting) == 2)
        first = await run.take(0)
        assert {pair.trace_id for pair in first.pairs} == {"train-000000-000", "train-000000-001"}
        assert (await run.take(1)).pairs == []
        world.go.set()
        await until(lambda: len(run.store.waiting) == 2)
        late = await run.take(2)
        assert {pair.trace_id for pair in late.pairs} == {"train-000001-000", "train-000001-001"}
        assert all(
            pair.reference == (-1.0, -float(len(pair.chosen_text.encode()))) for pair in late.pairs
        )


async def test_a_pair_that_is_too_old_is_not_trained_but_kept(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    async with running(World(toolbox), config_of("late", max_age=2)) as run:
        run.stream.begin(group_of(toolbox, 0, version=1))
        await until(lambda: len(run.store.waiting) == 2)
        taken = await run.take(4)
        assert (taken.pairs, taken.expired, len(run.kept)) == ([], 2, 2)


async def test_a_heap_of_late_pairs_is_spread_over_steps(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    async with running(World(toolbox), config_of("late")) as run:
        for group in range(PROMPTS * STEPS):
            run.stream.begin(group_of(toolbox, group))
        await until(lambda: len(run.store.waiting) == 4 * STEPS)
        first = await run.take(0)
        assert (len(first.pairs), first.waiting) == (MOST_BACKLOG * 2 * PROMPTS, 4)
        assert first.replay_outcome.states == 12
        assert (await run.take(1)).replay_outcome.states == 0


async def told(run: Running, steps: range) -> list[tuple[Any, ...]]:
    """What steps get, as numbers that must be the same to the last bit."""
    found = []
    for step in steps:
        taken = await run.take(step)
        figures = (
            taken.replay_outcome,
            taken.waiting,
            taken.usd_total,
            taken.saved_usd,
            taken.asked,
        )
        found.append((ids(taken.pairs), [pair.reference for pair in taken.pairs], *figures))
    return found


@pytest.mark.parametrize("stop", range(PROMPTS * STEPS + 1))
async def test_a_stream_that_goes_on_gives_what_the_undisturbed_one_gives(
    config_of: Any, toolbox: ToolboxTask, stop: int
) -> None:
    """Stopped after any group was refined: situations, duplicates and sums of dollars are known."""
    config = config_of("same_step")
    groups = [group_of(toolbox, group // 2) for group in range(PROMPTS * STEPS)]
    for group_id, group in enumerate(groups):  # every second group is a duplicate of another one
        renamed = [replace(t, group_id=group_id) for t in group]
        groups[group_id] = [
            replace(t, trace_id=f"train-{group_id:06d}-{n:03d}") for n, t in enumerate(renamed)
        ]
    async with running(World(toolbox), config) as run:
        for group in groups:
            run.stream.begin(group)
        whole = await told(run, range(STEPS))
        rows, kept = run.store.asked, {pair.pair_id: pair for pair in run.kept}
    planned = stop // PROMPTS
    taken = {pair_id for step in whole[:planned] for pair_id in step[0]}
    before = [pair for pair in kept.values() if int(pair.trace_id.split("-")[1]) < stop]
    left = [pair for pair in before if pair.pair_id not in taken]
    store = Store({n: rows[n] for n in range(stop)}, list(before), left)
    async with running(World(toolbox), config, store) as again:
        asked = (query_record_from_json(n, body, kept) for n, body in sorted(store.asked.items()))
        assert again.stream.restore(asked, planned * PROMPTS) == stop
        for group in groups[planned * PROMPTS :]:
            again.stream.begin(group)
        assert await told(again, range(planned, STEPS)) == whole[planned:]


async def test_groups_from_the_first_missing_row_on_are_asked_about_again(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    world, config = World(toolbox), config_of("same_step")
    async with running(world, config) as run:
        for group in range(PROMPTS):
            run.stream.begin(group_of(toolbox, group))
        await run.take(0)
        del run.store.asked[0]
    async with running(world, config, run.store) as again:
        kept = {pair.pair_id: pair for pair in run.kept}
        asked = (query_record_from_json(n, body, kept) for n, body in run.store.asked.items())
        assert again.stream.restore(asked, PROMPTS) == 0


async def test_no_group_waits_for_one_that_is_passed_over_which_is_asked_about_when_it_finishes(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    world = World(toolbox)
    async with running(world, config_of("same_step")) as run:
        for group in (0, 2, 3):
            run.stream.begin(group_of(toolbox, group))
        await until(lambda: len(world.asked) == 2)
        assert groups_of(world.asked) == {0}
        run.stream.pass_over([1])
        run.stream.pass_over([1])
        await run.take_before(0, 4)
        assert groups_of(world.asked) == {0, 2, 3}
        run.stream.begin(group_of(toolbox, 1))
        run.stream.begin(group_of(toolbox, 4))
        taken = await run.take_before(1, 5)
        assert [int(pair.trace_id.split("-")[1]) for pair in taken.pairs] == [1, 1, 4, 4]


async def test_a_resumed_stream_asks_about_carried_groups_alone(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    """Group 1 was passed over and had finished, groups 2 and 5 had not."""
    world, config = World(toolbox), config_of("same_step")
    async with running(world, config) as run:
        run.stream.pass_over([1, 2])
        for group in (0, 3, 4, 1):
            run.stream.begin(group_of(toolbox, group))
        run.stream.pass_over([5])
        run.stream.begin(group_of(toolbox, 6))
        await run.take_before(0, 7)
    world.asked.clear()
    async with running(world, config, run.store) as again:
        kept = {pair.pair_id: pair for pair in run.kept}
        asked = (query_record_from_json(n, b, kept) for n, b in sorted(run.store.asked.items()))
        assert again.stream.restore(asked, 7, [1, 2, 5]) == 7
        for group in (1, 5, 7, 2):
            again.stream.begin(group_of(toolbox, group))
        taken = await again.take_before(1, 8)
        assert [int(pair.trace_id.split("-")[1]) for pair in taken.pairs] == [
            6,
            6,
            5,
            5,
            7,
            7,
            2,
            2,
        ]
        assert groups_of(world.asked) == {2, 5, 7}


def groups_of(asked: Iterable[str]) -> set[int]:
    return {int(state.split("-")[1]) for state in asked}


async def test_draining_waits_for_the_last_teachers(config_of: Any, toolbox: ToolboxTask) -> None:
    world = World(toolbox, held={"train-000000-000"})
    async with running(world, config_of("late")) as run:
        run.stream.begin(group_of(toolbox, 0))
        await run.take(0)
        draining = asyncio.create_task(run.stream.drain())
        await until(lambda: len(world.asked) == 2)
        assert not draining.done()
        world.go.set()
        rest = await draining
        assert (rest.states, len(run.kept)) == (2, 2)


@pytest.mark.parametrize("delivery", ["late", "same_step"])
async def test_a_pool_that_is_lost_ends_the_run_at_its_next_step(
    config_of: Any, toolbox: ToolboxTask, delivery: str
) -> None:
    world = World(toolbox, broken=True)
    async with running(world, config_of(delivery)) as run:
        for group in range(PROMPTS):
            run.stream.begin(group_of(toolbox, group))
        with pytest.raises(Broken, match="train-000000-00"):  # noqa: PT012
            while True:
                await run.take(0)
                await asyncio.sleep(0)


async def test_filters_and_the_context_drop_pairs_before_the_reference_sees_them(
    config_of: Any, toolbox: ToolboxTask
) -> None:
    world = World(toolbox)
    async with running(world, config_of("same_step")) as run:
        repeated = [replace(trace, group_id=1) for trace in group_of(toolbox, 0)]
        again = [replace(t, trace_id=f"train-000001-{n:03d}") for n, t in enumerate(repeated)]
        run.stream.begin(group_of(toolbox, 0))
        run.stream.begin(again)
        assert (await run.take(0)).replay_outcome.dropped["exact_duplicates"] == 2
        for group in (2, 3):
            run.stream.begin(group_of(toolbox, group, width=20))
        taken = await run.take(1)
        assert taken.replay_outcome.dropped[TOO_LONG] == 4
        assert taken.pairs == []
        assert [len(batch) for batch in world.scored] == [2]
