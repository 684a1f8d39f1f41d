"""Half a run: the steps that a store can make, a trainer alone on them, and generators alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from controller_world import CHANNELS, World, others, rollouts_of
from fake_stored_training import Trainer
from hint_traces import group_of
from inspected_runs import a_pair, write_run

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.partial_runs.command import RolloutsOnly, Sampled
from composer_mesh.services.partial_runs.stored_steps import (
    OtherPolicy,
    StoredStep,
    StoredStepLost,
    StoredSteps,
    TrainingFromTraces,
    TrainingFromTracesPorts,
    as_trained,
)
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.replay.pair_stream import make_pair_stream
from composer_mesh.services.run.resume_loader import trained_steps
from composer_mesh.services.schedule.step_builder import PlannedStep, StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.toolbox import ToolboxTask

STEPS = 4
SHORT = {"run": {"name": "unit", "seed": 3, "steps": STEPS}}


@pytest.fixture
def config(request: pytest.FixtureRequest, build_config: Any) -> Config:
    """A test may give more keys of the schedule as this fixture's parameter."""
    schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": 1}
    schedule |= getattr(request, "param", {})
    return build_config(**SHORT, schedule=schedule, **CHANNELS)


def with_and_without_dynamic_sampling(test: Any) -> Any:
    kinds = [{}, {"dynamic_sampling": True}, {"overprovision": 1}]
    return pytest.mark.parametrize("config", kinds, indirect=True, ids=str)(test)


@pytest.fixture
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


@pytest.fixture
def world(toolbox: ToolboxTask, chat: ChatFormat) -> World:
    return World(toolbox, chat, seed=1)


def composer_of(config: Config, task: ToolboxTask, chat: ChatFormat) -> StepBuilder:
    return StepBuilder(Batcher(config, task, chat, make_advantages(config.advantage), print))


async def run_on(world: World, config: Config, root: Path) -> None:
    """A whole run whose store is the real one."""
    with RunStore(root, config) as store:
        waiting = store.reading.waiting_pairs
        stream = make_pair_stream(config, world, world, world.chat, store, waiting)
        rollouts = rollouts_of(world, config)
        ports = Ports(rollouts, stream, world, world, store, world, world.save, world.saved)
        step_builder = composer_of(config, world.task, world.chat)
        heldout = heldout_indices(world.task, config.eval.episodes)
        await Controller(config, world.task, step_builder, ports, heldout).run()


@with_and_without_dynamic_sampling
async def test_stored_steps_are_the_batches_that_a_run_has_trained(
    world: World, config: Config, tmp_path: Path
) -> None:
    await run_on(world, config, tmp_path)
    trained = world.names("trained")
    assert any(batch.pairs for batch in trained)
    assert any(batch.views for batch in trained)
    with RunReader(tmp_path) as reader:
        found = list(StoredSteps(reader, config, composer_of(config, world.task, world.chat)))
        metrics = [row.metrics for row in reader.steps()]
    assert [step.composed.batch for step in found] == trained
    assert [step.before for step in found] == metrics
    for step, before in zip(found, metrics, strict=True):
        again = step.composed.metrics({"loss/total": 0.0})
        assert {key: before[key] for key in again} == again


async def test_a_trainer_that_lost_a_checkpoint_gets_the_steps_that_it_has_trained(
    world: World, config: Config, tmp_path: Path
) -> None:
    await run_on(world, config, tmp_path)
    batches = world.names("trained")
    with RunReader(tmp_path) as reader:
        step_builder = composer_of(config, world.task, world.chat)
        found = trained_steps(reader, config, step_builder, 1, STEPS)
        step_builder = composer_of(config, world.task, world.chat)
        stored = as_trained(StoredSteps(reader, config, step_builder), reader, 1, STEPS)
        metrics = [row.metrics for row in reader.steps()]
    for steps in (found, stored):
        assert [one.batch for one in steps] == batches[1:]
        assert [one.metrics for one in steps] == metrics[1:]


@with_and_without_dynamic_sampling
async def test_groups_of_trained_steps_are_not_trained_twice(
    world: World, config: Config, build_config: Any, tmp_path: Path
) -> None:
    await run_on(world, config, tmp_path)
    run = {"name": "unit", "seed": 3, "steps": STEPS + 3}
    longer = build_config(run=run, schedule=config.schedule.model_dump(), **CHANNELS)
    with RunReader(tmp_path) as reader:
        found = list(StoredSteps(reader, longer, composer_of(longer, world.task, world.chat)))
    assert len(found) == STEPS


async def test_no_more_steps_than_the_config_asks_for_are_made(
    world: World, config: Config, build_config: Any, tmp_path: Path
) -> None:
    await run_on(world, config, tmp_path)
    run = {"name": "unit", "seed": 3, "steps": 2}
    short = build_config(run=run, schedule=config.schedule.model_dump(), **CHANNELS)
    with RunReader(tmp_path) as reader:
        assert (
            len(list(StoredSteps(reader, short, composer_of(short, world.task, world.chat)))) == 2
        )


@pytest.fixture
async def sampled(tmp_path: Path, config: Config, toolbox: ToolboxTask, chat: ChatFormat) -> Path:
    """Five groups that no step has taken; each first rollout has a pair."""
    scripts = ["stumbles", "quits", "right"]
    groups = [group_of(toolbox, chat, index, scripts) for index in range(5)]
    await write_run(tmp_path, config, groups)
    return tmp_path


async def test_groups_that_no_step_took_come_in_their_order_with_their_pairs(
    sampled: Path, build_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    config = build_config(**SHORT, replay={**CHANNELS["replay"], "loss": "simpo"})
    with RunReader(sampled) as reader:
        found = list(StoredSteps(reader, config, composer_of(config, toolbox, chat)))
    assert [step.composed.batch.step for step in found] == [0, 1]
    for step, groups in zip(found, ((0, 1), (2, 3)), strict=True):
        assert step.before is None
        assert [t.group_id for t in step.composed.traces] == [n for n in groups for _ in range(3)]
        taken = step.composed.taken
        assert taken is not None
        assert [pair.trace_id for pair in taken.pairs] == [f"train-{n:06d}-000" for n in groups]


async def test_dynamic_sampling_leaves_out_stored_groups_whose_rewards_are_all_equal(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    scripts = [["quits", "quits"], ["stumbles", "right"], ["quits", "right"], ["right", "right"]]
    groups = [group_of(toolbox, chat, index, names) for index, names in enumerate(scripts)]
    schedule = {"prompts_per_step": 2, "dynamic_sampling": True}
    config = build_config(**SHORT, schedule=schedule)
    await write_run(tmp_path, config, groups)
    with RunReader(tmp_path) as reader:
        found = list(StoredSteps(reader, config, composer_of(config, toolbox, chat)))
    (step,) = found
    assert {trace.group_id for trace in step.composed.traces} == {1, 2}


async def test_groups_that_no_step_took_are_trained_whatever_their_age(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    config = build_config(
        **SHORT, schedule={"prompts_per_step": 1, "max_lag": 1, "carried_groups": 2}
    )
    scripts = ["stumbles", "quits", "right"]
    groups = [group_of(toolbox, chat, index, scripts) for index in range(STEPS)]
    await write_run(tmp_path, config, groups)
    with RunReader(tmp_path) as reader:
        found = list(StoredSteps(reader, config, composer_of(config, toolbox, chat)))
    masks = [[any(one.mask) for one in step.composed.batch.samples] for step in found]
    assert masks == [[True] * 3] * STEPS


async def test_pairs_without_the_scores_that_the_loss_needs_are_left_out(
    sampled: Path, config: Config, build_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    assert a_pair(group_of(toolbox, chat, 0, ["quits"])[0]).reference is None
    left_out = {}
    for loss in ("dpo", "simpo"):
        replay = {**CHANNELS["replay"], "loss": loss}
        settings = build_config(**SHORT, sdpo=CHANNELS["sdpo"], replay=replay)
        with RunReader(sampled) as reader:
            steps = StoredSteps(reader, settings, composer_of(settings, toolbox, chat))
            pairs = [len(step.composed.batch.pairs) for step in steps]
        left_out[settings.replay.needs_reference] = (steps.pairs_left_out, sum(pairs) > 0)
    assert left_out == {True: (5, False), False: (0, True)}


async def test_a_damaged_group_ends_the_replay_with_its_step_and_the_repair(
    sampled: Path, config: Config, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    path_of(sampled, 3).write_bytes(b"torn")
    with RunReader(sampled) as reader:
        steps = iter(StoredSteps(reader, config, composer_of(config, toolbox, chat)))
        next(steps)
        with pytest.raises(StoredStepLost, match=r"step 2 .*000003.*run\.steps=1"):
            next(steps)


async def test_rollouts_of_another_policy_are_refused_before_anything_is_trained(
    tmp_path: Path, config: Config, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    other = ChatFormat(chat.tokenizer, [])  # its prompts name no tools
    groups = [group_of(toolbox, other, index, ["quits"] * 2) for index in range(2)]
    await write_run(tmp_path, config, groups)
    with RunReader(tmp_path) as reader:
        steps = StoredSteps(reader, config, composer_of(config, toolbox, chat))
        with pytest.raises(OtherPolicy, match=r"train-000000-000 .*policy\.path"):
            list(steps)


def a_step(step: int, loss: float | None = None) -> StoredStep:
    batch = StepBatch(step, [], [], [])
    before = None if loss is None else {"loss/total": loss, "policy/grad_norm": 2.0}
    return StoredStep(PlannedStep(batch, [], None, Corrections()), before)


async def replay_outcome(
    config: Config, trainer: Trainer, steps: Sequence[StoredStep]
) -> TrainingFromTraces:
    port: Any = trainer
    training = TrainingFromTraces(
        config, steps, TrainingFromTracesPorts(port, port, port, port, port.save, port.saved)
    )
    await training.run()
    return training


async def test_a_replay_trains_each_step_and_saves_where_a_run_would(build_config: Any) -> None:
    config = build_config(**SHORT, trainer={"checkpoint_every": 2})
    for count, saves in ((4, [2, 4]), (3, [2, 3]), (2, [2]), (0, [])):
        trainer = Trainer()
        training = await replay_outcome(config, trainer, [a_step(n) for n in range(count)])
        order = [("plan", 0), ("train", 0), ("end", 0), ("shown", 1)]
        assert trainer.names("plan", "train", "end", "shown")[:4] == order[: 4 * bool(count)]
        assert trainer.names("train") == [("train", n) for n in range(count)]
        assert trainer.names("save") == [("save", n) for n in saves]
        assert trainer.done[-1] == ("saved", 0)
        assert (training.step, training.differences.steps) == (count, 0)


async def test_a_replay_tells_what_is_not_as_it_was(build_config: Any) -> None:
    config = build_config(**SHORT)
    steps = [a_step(0, 1.0), a_step(1, 1.0), a_step(2)]
    same = await replay_outcome(config, Trainer(), steps)
    assert str(same.differences) == "2 steps trained again to the same losses and gradients"
    other = await replay_outcome(config, Trainer(losses={1: 1.5}), steps)
    assert other.differences.largest == pytest.approx(0.5)


async def test_generators_alone_sample_every_group_and_no_further_ahead_than_a_run(
    world: World, config: Config
) -> None:
    told: list[Sampled] = []
    alone = RolloutsOnly(config, world.task, rollouts_of(world, config), world, told.append)
    await alone.run()
    size, traces = config.schedule.prompts_per_step, world.names("stored")
    assert {trace.group_id for trace in traces} == set(range(STEPS * size))
    assert {trace.oldest_version() for trace in traces} == {0}
    stored, ahead = set[int](), list[int]()
    for kind, what in world.done:
        if kind == "stored":
            stored.add(what.group_id)
        elif kind == "entered":
            finished = next((n for n in range(STEPS * size) if n not in stored), STEPS * size)
            ahead.append(what - finished)
    assert max(ahead) < 2 * size
    assert [one.step for one in told] == [1, 2, 3, 4]
    assert alone.total.tokens == sum(trace.action_tokens() for trace in traces)
    assert alone.total.rollouts == len(traces)
    assert alone.total.reward == pytest.approx(sum(t.reward for t in traces) / len(traces))
    assert {"planned", "trained", "served"}.isdisjoint(kind for kind, _ in world.done)


@dataclass
class Hanging(World):
    """Whose policy never answers."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest, group: str = "") -> GenerationResult:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_generators_alone_leave_nothing_under_way_when_they_are_stopped(
    world: World, config: Config
) -> None:
    world = Hanging(world.task, world.chat, seed=1)
    alone = RolloutsOnly(config, world.task, rollouts_of(world, config), world, lambda _: None)
    task = asyncio.create_task(alone.run())
    await world.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert others() == set()
    assert alone.total == Sampled(0, 0, 0, 0.0, 0)
