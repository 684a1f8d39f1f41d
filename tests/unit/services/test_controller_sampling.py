"""Dynamic sampling and over-provisioned groups in the controller, on ports that are fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_world import CHANNELS, MakeWorld, World, controller_of, finished, others
from repetition import crossed

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.schedule.groups import ResumeState, StoredGroup
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPTS, STEPS = 2, 5
Groups = dict[int, list[Trace]]


@pytest.fixture(scope="module")
def make_world(tokenizer: Any, toolbox: ToolboxTask) -> MakeWorld:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda **options: World(toolbox, chat, **options)


@pytest.fixture
def build(build_config: Any) -> Any:
    def config(max_lag: int, oversampling: float = 4, **sections: Any) -> Config:
        schedule = {"prompts_per_step": PROMPTS, "group_size": 3, "max_lag": max_lag}
        schedule |= {"dynamic_sampling": True, "oversampling": oversampling}
        run = {"name": "unit", "seed": 3, "steps": STEPS}
        return build_config(run=run, schedule=schedule, **sections)

    return config


def sampled(world: World) -> Groups:
    """The stored groups, which are all that were sampled."""
    groups: Groups = {}
    for trace in world.names("stored"):
        groups.setdefault(trace.group_id, []).append(trace)
    return groups


def expected_steps(groups: Groups, most: int) -> list[tuple[list[int], list[int]]]:
    """The groups that each step keeps and drops, from the rewards alone."""
    steps, place = [], 0
    for _ in range(STEPS):
        kept, dropped = list[int](), list[int]()
        while len(kept) < PROMPTS and len(kept) + len(dropped) < most:
            (dropped if equal_rewards(groups[place]) else kept).append(place)
            place += 1
        steps.append((kept, dropped))
    assert place == len(groups), "a group was sampled that no step takes"
    return steps


@pytest.mark.parametrize(("channels", "max_lag"), crossed([{}, CHANNELS], [0, 1, 2]))
async def test_steps_take_groups_in_order_until_enough_of_them_differ_in_reward(
    make_world: MakeWorld, build: Any, max_lag: int, channels: dict[str, Any]
) -> None:
    for seed in range(2):
        world = make_world(seed=seed)
        await finished(world, build(max_lag, **channels))
        groups = sampled(world)
        steps = [(list(one.groups), list(one.dropped)) for one in world.names("planned")]
        assert steps == expected_steps(groups, 4 * PROMPTS)
        assert any(dropped for _, dropped in steps)
        for batch, (kept, _) in zip(world.names("trained"), steps, strict=True):
            ids = [trace.trace_id for group in kept for trace in groups[group]]
            assert [sample.trace_id for sample in batch.samples] == ids
        assert max(metrics["lag/max"] for metrics in world.names("metrics")) <= max_lag
        assert others() == set()


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_dropped_group_is_stored_and_reaches_no_channel(
    make_world: MakeWorld, build: Any, max_lag: int
) -> None:
    world = make_world(seed=4)
    await finished(world, build(max_lag, **CHANNELS))
    dropped = {group for one in world.names("planned") for group in one.dropped}
    groups = sampled(world)
    silent = {trace.trace_id for group in dropped for trace in groups[group]}
    assert len(silent) == 3 * len(dropped) > 0
    asked = set(world.names("asked"))
    views = {view.trace_id for batch in world.names("trained") for view in batch.views}
    assert asked
    assert views
    assert not silent & (asked | views)


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_step_that_finds_too_few_groups_trains_on_fewer_and_says_so(
    make_world: MakeWorld, build: Any, max_lag: int
) -> None:
    world = make_world(seed=5)
    await finished(world, build(max_lag, oversampling=1))
    steps = [(list(one.groups), list(one.dropped)) for one in world.names("planned")]
    assert steps == expected_steps(sampled(world), PROMPTS)
    missing = [PROMPTS - len(kept) for kept, _ in steps]
    assert any(missing)
    assert [m["rollouts/missing_groups"] for m in world.names("metrics")] == missing
    assert len(world.names("groups_missing")) == sum(map(bool, missing))
    assert "schedule.oversampling above 1" in world.names("groups_missing")[0][1]


async def test_a_step_without_any_group_to_keep_is_trained_on_nothing(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=5, error_rate=0.0)
    await finished(world, build(1, oversampling=2))
    assert [batch.samples for batch in world.names("trained")] == [[]] * STEPS
    assert len(world.names("groups_missing")) == STEPS
    assert len(sampled(world)) == STEPS * 2 * PROMPTS


async def test_the_metrics_tell_what_was_sampled_and_what_was_trained(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=6)
    await finished(world, build(1))
    groups = sampled(world)
    for one, metrics in zip(world.names("planned"), world.names("metrics"), strict=True):
        taken = [trace for group in (*one.groups, *one.dropped) for trace in groups[group]]
        assert metrics["rollouts/dropped_groups"] == len(one.dropped)
        assert metrics["rollouts/count"] == 3 * len(one.groups)
        assert metrics["rollouts/sampled"] == len(taken)
        mean = sum(trace.reward for trace in taken) / len(taken)
        assert metrics["reward/sampled"] == pytest.approx(mean)
        assert metrics["rollouts/flat_groups"] == 0


async def test_a_synchronous_run_makes_the_same_batches_by_its_seed(
    make_world: MakeWorld, build: Any
) -> None:
    """The order in which samples get on differs; what a step trains on does not."""
    worlds = [make_world(seed=seed) for seed in (7, 8)]
    for world in worlds:
        await finished(world, build(0, **CHANNELS))
    one, two = worlds
    assert one.names("trained") == two.names("trained")
    assert one.names("planned") == two.names("planned")


async def test_a_synchronous_run_refills_between_its_closed_batches(
    make_world: MakeWorld, build: Any
) -> None:
    """No group enters while another one runs, or its closed batch would depend on time."""
    world = make_world(seed=7)
    await finished(world, build(0))
    running = set[int]()
    last = ""
    for kind, what in world.done:
        if kind == "entered":
            assert last == "entered" or not running
            running.add(what)
        elif kind == "stored" and what.sample == 2:
            running.discard(what.group_id)
        last = kind if kind in ("entered", "stored", "begin") else last


async def test_where_rollouts_may_run_ahead_a_replacement_starts_before_its_step_is_due(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=9, hang="train")
    controller = controller_of(world, build(1))
    running = asyncio.create_task(controller.run())
    for _ in range(20_000):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    groups = sampled(world)
    teaching = [group for group in sorted(groups) if not equal_rewards(groups[group])]
    assert len(teaching) == 2 * PROMPTS, "all of the second step's groups are there too"
    assert teaching[-1] == max(groups)


def newest_version(group: list[Trace]) -> int:
    return max(version for trace in group for turn in trace.turns for version in turn.versions)


@pytest.mark.parametrize(("max_lag", "stop"), crossed([0, 1, 2], range(1, STEPS)))
async def test_a_resumed_run_takes_the_groups_that_the_whole_run_would_have_taken(
    make_world: MakeWorld, build: Any, max_lag: int, stop: int
) -> None:
    """In order, without a gap, and those that are stored without sampling them again."""
    config = build(max_lag)
    before = make_world(seed=10)
    await finished(before, config)
    manifests, groups = before.names("planned"), sampled(before)
    next_group = max(manifests[stop - 1].taken_groups) + 1
    known = [n for n in groups if n >= next_group and newest_version(groups[n]) <= stop][:PROMPTS]
    left = {n: StoredGroup(groups[n]) for n in known}
    world = make_world(seed=11, groups={n: groups[n] for n in known})
    world.trained = world.newest = world.served = stop
    state = ResumeState(stop, Checkpoint(stop, Path()), groups=left, next_group=next_group)
    await controller_of(world, config, state).run()
    resumed = world.names("planned")
    assert [one.step for one in resumed] == list(range(stop, STEPS))
    begun = {int(name.split("-")[1]) for name in world.names("begin") if "train" in name}
    assert not begun & set(left)
    taken = [n for one in resumed for n in sorted((*one.groups, *one.dropped))]
    assert taken == list(range(next_group, next_group + len(taken)))
    if max_lag == 0:
        assert resumed == manifests[stop:]


async def test_over_provisioned_rollouts_are_cancelled_once_a_group_is_full(
    make_world: MakeWorld, build_config: Any
) -> None:
    world = make_world(seed=12)
    schedule = {"prompts_per_step": PROMPTS, "group_size": 3, "max_lag": 1, "overprovision": 2}
    await finished(world, build_config(schedule=schedule, logprob_mismatch={"all_tokens": True}))
    groups = sampled(world)
    assert {len(traces) for traces in groups.values()} == {3}
    assert any([one.sample for one in traces] != [0, 1, 2] for traces in groups.values())
    cancelled = [metrics["rollouts/cancelled"] for metrics in world.names("metrics")]
    assert 0 < sum(cancelled) <= 2 * len(groups)
    assert world.sessions == {}
    assert others() == set()
