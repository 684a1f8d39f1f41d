"""Dynamic sampling and carried groups on a real run directory: a run that is stopped goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from controller_world import CHANNELS, World, rollouts_of

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import equal_rewards
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.replay.pair_stream import make_pair_stream
from composer_mesh.services.run.parts import make_episode_order
from composer_mesh.services.run.resume_loader import (
    load_resume_state,
    restore_teacher_queries,
    resume_state_of,
)
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPTS, STEPS = 2, 4


@pytest.fixture
def build(build_config: Any) -> Any:
    def config(
        max_lag: int,
        curriculum: dict[str, Any] | None = None,
        carried: int = 0,
        dynamic: bool = True,
    ) -> Config:
        schedule = {"prompts_per_step": PROMPTS, "group_size": 3, "max_lag": max_lag}
        schedule |= {"dynamic_sampling": True, "oversampling": 2} if dynamic else {}
        schedule["carried_groups"] = carried
        run = {"name": "unit", "seed": 3, "steps": STEPS}
        data = {"curriculum": curriculum} if curriculum else {}
        return build_config(run=run, schedule=schedule, data=data, **CHANNELS)

    return config


@pytest.fixture
def new_world(tokenizer: Any, toolbox: ToolboxTask) -> Any:
    chat = ChatFormat(tokenizer, toolbox.tools)
    return lambda seed: World(toolbox, chat, seed=seed)


SLOW = {1, 4}


class SlowGroups(World):
    """Where the policy is slow in some groups: it waits for two steps more than they need."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stepped = asyncio.Event()

    async def generate(self, request: GenerationRequest, group: str = "") -> GenerationResult:
        split, number, *_ = request.request_id.split("-")
        if split == "train" and int(number) in SLOW:
            while self.trained < min(int(number) // PROMPTS + 2, STEPS - 1):
                await self.stepped.wait()
        return await super().generate(request, group)

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        trained = await super().train(batch)
        self.stepped.set()
        self.stepped = asyncio.Event()
        return trained


async def go_on(world: World, config: Config, root: Path, turns: int | None = None) -> bool:
    """Begin or resume the run, for so many turns of the loop; return whether it has ended."""
    with RunStore(root, config) as store:
        past = await load_resume_state(store, config, world.event)
        stream = make_pair_stream(
            config, world, world, world.chat, store, store.reading.waiting_pairs
        )
        step_builder = StepBuilder(
            Batcher(config, world.task, world.chat, make_advantages(config.advantage), print)
        )
        state = resume_state_of(past, step_builder)
        restore_teacher_queries(past, stream, store.reading, state.next_group)
        world.trained = world.newest = world.served = state.steps
        rollouts = rollouts_of(world, config)
        ports = Ports(rollouts, stream, world, world, store, world, world.save, world.saved)
        heldout = heldout_indices(world.task, config.eval.episodes)
        order = make_episode_order(config, world.task, past)
        controller = Controller(
            config, world.task, step_builder, ports, heldout, state, order=order
        )
        running = asyncio.create_task(controller.run())
        while not running.done() and turns != 0:
            await asyncio.sleep(0)
            turns = None if turns is None else turns - 1
        ended = running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not ended or running.exception() is None
        return ended


def manifests(root: Path) -> list[StepManifest]:
    with RunReader(root) as reader:
        return [manifest_from_json(row.step, row.manifest) for row in reader.steps()]


def check(root: Path, worlds: list[World], config: Config) -> None:
    """Every group was taken once, in order, with what it was first stored with."""
    steps = manifests(root)
    taken = [group for one in steps for group in sorted((*one.groups, *one.dropped))]
    assert taken == list(range(len(taken)))
    check_groups(root, taken)
    with RunReader(root) as reader:
        groups = {group: reader.traces(group) for group in taken}
    for one in steps:
        assert [n for n in one.dropped if not equal_rewards(groups[n])] == []
        assert [n for n in one.groups if equal_rewards(groups[n])] == []
        versions = [
            v for n in one.groups for t in groups[n] for turn in t.turns for v in turn.versions
        ]
        assert all(0 <= one.step - v <= config.schedule.max_lag for v in versions)
    silent = {trace.trace_id for one in steps for n in one.dropped for trace in groups[n]}
    assert silent
    assert silent.isdisjoint(asked for world in worlds for asked in world.names("asked"))


def check_groups(root: Path, taken: list[int]) -> None:
    """Every group that has entered was taken, and teachers were asked about it."""
    with RunReader(root) as reader:
        assert [row.group_id for row in reader.groups()] == taken
        assert [metrics["step"] for metrics in reader.metrics()] == list(range(1, STEPS + 1))
        assert {row.group_id for row in reader.teacher_queries()} == set(taken)


def check_episodes(root: Path, config: Config) -> None:
    """Every stored group is known by its episode, of which none was left out."""
    steps = manifests(root)
    if config.data.curriculum is None:
        assert not any(one.results for one in steps)
        return
    results = [one for step in steps for one in step.results]
    taken = [group for one in steps for group in sorted((*one.groups, *one.dropped))]
    assert [one.group_id for one in results] == taken
    with RunReader(root) as reader:
        for one in results:
            traces = reader.traces(one.group_id)
            assert {trace.index for trace in traces} == {one.episode}
            assert sum(trace.success for trace in traces) == one.successes
        assert all("curriculum/new" in metrics for metrics in reader.metrics())
    episodes = {one.episode for one in results}
    assert episodes == set(range(len(episodes)))
    assert len(episodes) < len(results), "some were played again"


CURRICULUM = {"low": 0.3, "high": 0.7, "explore": 0.2}


@pytest.mark.parametrize(("max_lag", "curriculum"), [(0, None), (1, CURRICULUM), (2, None)])
async def test_a_run_that_is_stopped_anywhere_takes_every_group_once(
    tmp_path: Path, build: Any, new_world: Any, max_lag: int, curriculum: dict[str, Any] | None
) -> None:
    config = build(max_lag, curriculum)
    worlds = [new_world(seed) for seed in range(40)]
    ended = False
    for used, world in enumerate(worlds, 1):
        ended = await go_on(world, config, tmp_path, turns=None if used == 40 else 150 + 20 * used)
        if ended:
            break
    assert ended
    assert used > 3
    check(tmp_path, worlds, config)
    check_episodes(tmp_path, config)


@pytest.mark.parametrize(("max_lag", "dynamic"), [(1, False), (2, False), (1, True)])
async def test_a_carrying_run_that_is_stopped_anywhere_takes_every_group_once(
    tmp_path: Path,
    build: Any,
    tokenizer: Any,
    toolbox: ToolboxTask,
    max_lag: int,
    dynamic: bool,
) -> None:
    chat = ChatFormat(tokenizer, toolbox.tools)
    config = build(max_lag, carried=2, dynamic=dynamic)
    ended, used, planned = False, 0, list[tuple[int, ...]]()
    while not ended:
        world = SlowGroups(toolbox, chat, seed=used)
        ended = await go_on(world, config, tmp_path, turns=150 + 20 * used)
        used += 1
        steps = [one.taken_groups for one in manifests(tmp_path)]
        assert steps[: len(planned)] == planned, "what was planned before is trained as it was"
        planned = steps
    taken = [group for one in planned for group in one]
    assert used > 3
    assert taken != sorted(taken), "no group was passed over"
    assert len(set(taken)) == len(taken)
    full = all(len(one.groups) == PROMPTS for one in manifests(tmp_path))
    assert full or dynamic
    if full:
        check_groups(tmp_path, sorted(taken))
    with RunReader(tmp_path) as reader:
        assert max(metrics["lag/max"] for metrics in reader.metrics()) <= max_lag + 1
        assert max(metrics["rollouts/carried"] for metrics in reader.metrics()) <= 2


@pytest.mark.parametrize("curriculum", [None, CURRICULUM], ids=["in order", "curriculum"])
async def test_a_synchronous_run_that_is_stopped_takes_and_drops_what_the_whole_run_does(
    tmp_path: Path, build: Any, new_world: Any, curriculum: dict[str, Any] | None
) -> None:
    config = build(0, curriculum)
    assert await go_on(new_world(50), config, tmp_path / "whole")
    used = 0
    while not await go_on(new_world(used), config, tmp_path / "stopped", 200 + 50 * used):
        used += 1
    assert used > 1
    whole, stopped = manifests(tmp_path / "whole"), manifests(tmp_path / "stopped")
    assert [(one.groups, one.dropped, one.pairs, one.results) for one in stopped] == [
        (one.groups, one.dropped, one.pairs, one.results) for one in whole
    ]
    check_episodes(tmp_path / "stopped", config)
    with RunReader(tmp_path / "whole") as one, RunReader(tmp_path / "stopped") as other:
        for row in one.groups():
            assert one.traces(row.group_id) == other.traces(row.group_id)
