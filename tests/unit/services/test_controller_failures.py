"""The controller when rollouts fail: they are run again, and what fails again is left out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from controller_world import (
    CHANNELS,
    MakeWorld,
    RandomFaults,
    World,
    finished,
    others,
    rollouts_of,
)
from fake_store import Broken
from in_process_player import InProcessGenerator, LockstepPlayer
from repetition import LONG, crossed, repeated

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.episodes.rollout import RolloutsFail
from composer_mesh.services.pool.dispatch import ServiceClosed
from composer_mesh.tasks.errors import JudgesSpent
from composer_mesh.tasks.toolbox import ToolboxTask

PATIENT = {"rollout_retries": 200}


@dataclass
class Always:
    """Calls of these episodes fail at a port, each time in the same way."""

    names: tuple[str, ...]
    port: str = "step"
    kills: bool = False

    def __call__(self, world: World, port: str, session: str) -> None:
        if port == self.port and session.startswith(self.names):
            if self.kills:
                world.kill(session)
            else:
                raise Broken(f"{session} cannot go on")


@pytest.fixture(scope="module")
def make_world(tokenizer: Any, toolbox: ToolboxTask) -> MakeWorld:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda **options: World(toolbox, chat, **options)


@pytest.fixture
def build(build_config: Any) -> Any:
    """Five steps of two groups of three, with all channels on."""

    def config(max_lag: int = 0, steps: int = 5, **supervision: Any) -> Config:
        schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": max_lag}
        run = {"name": "unit", "seed": 3, "steps": steps}
        sections = {**CHANNELS, "schedule": schedule, "run": run, "supervision": supervision}
        return build_config(**sections)

    return config


def trace_ids(groups: int) -> list[str]:
    return [f"train-{group:06d}-{n:03d}" for group in range(groups) for n in range(3)]


def without_versions(trace: Trace) -> Trace:
    turns = [replace(turn, versions=[0] * len(turn.versions)) for turn in trace.turns]
    return replace(trace, turns=turns)


@pytest.mark.parametrize(("seed", "max_lag"), crossed(range(2), [0, 1, 2]))
async def test_under_random_failures_every_rollout_arrives_once_and_as_it_would_have_been(
    make_world: MakeWorld, build: Any, seed: int, max_lag: int
) -> None:
    config = build(max_lag, **PATIENT)
    calm, faults = make_world(seed=seed), RandomFaults(seed, rate=0.08)
    stormy = make_world(seed=seed + 100, faults=faults)
    for world in (calm, stormy):
        await finished(world, config)
    assert faults.count > 20
    assert stormy.deaths > 3
    wanted, found = (
        {trace.trace_id: without_versions(trace) for trace in world.names("stored")}
        for world in (calm, stormy)
    )
    assert found == wanted
    assert len(stormy.names("stored")) == len(found)
    taken = [sample.trace_id for batch in stormy.names("trained") for sample in batch.samples]
    assert taken == trace_ids(10)
    assert stormy.names("poisoned") == []
    assert stormy.sessions == {}
    assert others() == set()


@pytest.mark.parametrize("seed", repeated(range(2)))
async def test_a_synchronous_run_trains_on_the_same_batches_whatever_failed_on_the_way(
    make_world: MakeWorld, build: Any, seed: int
) -> None:
    calm, stormy = make_world(seed=1), make_world(seed=2, faults=RandomFaults(seed, rate=0.08))
    for world in (calm, stormy):
        await finished(world, build(**PATIENT))
    assert stormy.names("trained") == calm.names("trained")


async def test_no_token_is_older_than_max_lag_when_rollouts_are_run_again(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=4, faults=RandomFaults(4, rate=0.08))
    await finished(world, build(max_lag=2, **PATIENT))
    assert max(metrics["lag/max"] for metrics in world.names("metrics")) <= 2


async def test_retries_are_told_and_counted(make_world: MakeWorld, build: Any) -> None:
    faults = RandomFaults(5, rate=0.08)
    world = make_world(seed=5, faults=faults)
    await finished(world, build(**PATIENT))
    counted = sum(metrics["rollouts/retried"] for metrics in world.names("metrics"))
    assert 0 < counted <= faults.count + len(world.homes)
    _, detail = world.names("rollout_retried")[0]
    assert detail.split(":")[0] in world.homes
    assert {metrics["rollouts/poisoned"] for metrics in world.names("metrics")} == {0}


async def test_an_episode_that_fails_in_the_same_way_is_set_aside_and_the_others_go_on(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=6, faults=Always(("train-000003",)))
    controller = await finished(world, build())
    (poisoned,) = world.names("poisoned")
    assert (poisoned.episode.split, poisoned.episode.index) == ("train", 3)
    assert poisoned.error.startswith("Broken: train-000003-00")
    assert poisoned.traceback.startswith("Traceback")
    assert 2 <= poisoned.attempts <= 6
    ((_, detail),) = world.names("input_poisoned")
    assert "set aside after" in detail
    taken = [sample.trace_id for batch in world.names("trained") for sample in batch.samples]
    assert taken == [name for name in trace_ids(10) if not name.startswith("train-000003")]
    assert controller.step == 5
    assert [metrics["rollouts/poisoned"] for metrics in world.names("metrics")].count(1) == 1


async def test_a_rollout_that_fails_is_missed_by_its_group_and_has_no_reward(
    make_world: MakeWorld, build: Any
) -> None:
    lost = ("train-000001-001", "train-000004-000")
    world = make_world(seed=7, faults=Always(lost))
    await finished(world, build())
    stored = Counter(trace.group_id for trace in world.names("stored"))
    assert stored == {**dict.fromkeys(range(10), 3), 1: 2, 4: 2}
    assert {trace.trace_id for trace in world.names("stored")} == set(trace_ids(10)) - set(lost)
    counts = [metrics["rollouts/count"] for metrics in world.names("metrics")]
    assert counts == [5, 6, 5, 6, 6]


async def test_an_episode_that_kills_its_environment_each_time_is_set_aside_at_last(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=8, faults=Always(("train-000002",), kills=True))
    await finished(world, build(rollout_retries=2))
    (poisoned,) = world.names("poisoned")
    assert poisoned.episode.index == 2
    assert poisoned.cause == "infrastructure"
    assert 3 <= world.deaths <= 3 * 3
    assert {trace.group_id for trace in world.names("stored")} == set(range(10)) - {2}


async def test_a_sample_that_fails_differently_each_time_is_given_up_without_its_episode(
    make_world: MakeWorld, build: Any
) -> None:
    times = Counter[str]()

    def never_the_same(world: World, port: str, session: str) -> None:
        if session.startswith("train-000001-002") and port == "step":
            times["failed"] += 1
            raise Broken(f"no. {times['failed']}")

    world = make_world(seed=9, faults=never_the_same)
    await finished(world, build(rollout_retries=3))
    assert times["failed"] == 4
    ((_, detail),) = world.names("rollout_given_up")
    assert detail == "train-000001-002, after 4 failures: Broken: no. 4"
    assert world.names("poisoned") == []
    assert len(world.names("stored")) == 29


async def test_a_run_whose_rollouts_mostly_fail_ends_with_one_clear_error(
    make_world: MakeWorld, build: Any
) -> None:
    late = tuple(f"train-{group:06d}" for group in range(4, 99))
    world = make_world(seed=10, faults=Always(late))
    message = r"step 4 has less than half of its rollouts in 2 of 2 groups, .* Broken: train-00000"
    with pytest.raises(RolloutsFail, match=message):
        await finished(world, build(steps=9))
    assert world.trained == 3
    assert world.sessions == {}
    assert others() == set()


async def test_a_held_out_episode_that_cannot_be_run_is_left_out_and_not_asked_again(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=11, faults=Always(("heldout-000002",)))
    controller = await finished(world, build())
    assert [(one.step, one.episodes) for one in controller.evaluations] == [(0, 3), (5, 3)]
    assert [one.success for one in controller.evaluations] == [1.0, 1.0]
    assert len(world.names("poisoned")) == 1
    resume_state = Counter(name.partition(".")[0] for name in world.names("begin"))
    assert resume_state["heldout-000002-000"] == 2
    assert resume_state["heldout-000001-000"] == 2


def in_lockstep(world: World) -> tuple[LockstepPlayer, InProcessGenerator]:
    """A player with one generator that answers what a world's policy says."""
    generator = InProcessGenerator(world.generate)
    return LockstepPlayer({"generator-0": generator}, world, world.chat), generator


async def test_in_lockstep_a_sample_that_is_given_up_holds_up_nobody(
    make_world: MakeWorld, build: Any
) -> None:
    world = make_world(seed=12, faults=Always(("train-000000-001",)))
    player, generator = in_lockstep(world)
    rollouts = rollouts_of(world, build(), player)
    sampling = Sampling(1.0, 64, 512, 3)
    episodes = [world.task.episode("train", index) for index in range(2)]
    started = [rollouts.start(episode, n, 3, sampling) for n, episode in enumerate(episodes)]
    traces = [await asyncio.gather(*group) for group in started]
    assert [[trace is not None for trace in group] for group in traces] == [
        [True, False, True],
        [True, True, True],
    ]
    assert generator.batches[0] == sorted(f"{name}-00" for name in trace_ids(2))
    await rollouts.close()
    assert others() == set()


async def test_in_lockstep_rollouts_that_are_run_again_keep_their_seeds(
    make_world: MakeWorld, build: Any
) -> None:
    episode = make_world().task.episode("train", 0)
    found = []
    for faults in (None, RandomFaults(13, rate=0.1)):
        world = make_world(seed=13, faults=faults)
        rollouts = rollouts_of(world, build(**PATIENT), in_lockstep(world)[0])
        found.append(
            await asyncio.gather(*rollouts.start(episode, 0, 8, Sampling(1.0, 64, 512, 3)))
        )
        await rollouts.close()
    assert found[0] == found[1]


@LONG
async def test_a_stormy_run_that_is_cancelled_at_any_moment_leaves_nothing_running(
    make_world: MakeWorld, build: Any
) -> None:
    for moment in random.Random(14).sample(range(400), 20):
        world = make_world(seed=moment, faults=RandomFaults(moment, rate=0.1))
        running = asyncio.create_task(finished(world, build(max_lag=1, **PATIENT)))
        for _ in range(moment):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert others() == set(), moment
        assert world.sessions == {}, moment


async def test_the_end_of_the_service_is_not_tried_again(make_world: MakeWorld, build: Any) -> None:
    def closed(world: World, port: str, session: str) -> None:
        raise ServiceClosed("environment")

    world = make_world(seed=15, faults=closed)
    with pytest.raises(ServiceClosed):
        await finished(world, build())
    assert not any(name.endswith(".2") for name in world.homes)
    assert world.names("rollout_retried") == []


@dataclass
class Spent:
    """Judges at their ceiling, from the episodes of this group on."""

    group: int

    def __call__(self, world: World, port: str, session: str) -> None:
        split, group, *_ = session.split("-")
        if port == "finish" and split == "train" and int(group) >= self.group:
            raise JudgesSpent("quality", "the judges have spent it")


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_spent_ceiling_of_judges_ends_a_run_with_a_checkpoint_and_no_retry(
    make_world: MakeWorld, build: Any, max_lag: int
) -> None:
    world = make_world(faults=Spent(4), seed=2)
    with pytest.raises(JudgesSpent, match="the judges have spent it"):
        await finished(world, build(max_lag))
    assert ("saved", 2) in world.done  # two steps of two groups
    assert ("on disk", 2) in world.done
    assert not [one for one in world.done if one[0] in ("rollout_retried", "input_poisoned")]
