"""A run that goes on from a checkpoint: it does what the undisturbed run did from there on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from controller_world import CHANNELS, World, controller_of, finished

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.controller import Controller
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.replay.teacher_queries import TeacherQueryRecord
from composer_mesh.services.schedule.groups import ResumeState
from composer_mesh.services.steps.step_manifest import ReplayOutcome
from composer_mesh.tasks.toolbox import ToolboxTask

STEPS, START = 5, 3


@pytest.fixture(params=[0, 1, 2])
def config(request: pytest.FixtureRequest, build_config: Any) -> Config:
    schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": request.param}
    run = {"name": "unit", "seed": 3, "steps": STEPS}
    return build_config(run=run, schedule=schedule, trainer={"checkpoint_every": 2}, **CHANNELS)


@pytest.fixture
def world(tokenizer: Any, toolbox: ToolboxTask) -> World:
    """Whose trainer has loaded a checkpoint, and whose generators have not heard of it."""
    world = World(toolbox, ChatFormat(tokenizer, toolbox.tools), seed=1)
    world.trained = START
    return world


async def resumed(
    world: World, config: Config, evaluations: tuple[Evaluation, ...] = (), start: int = START
) -> Controller:
    taken = start * config.schedule.prompts_per_step
    resume_state = ResumeState(
        start, Checkpoint(start, Path()), evaluations=list(evaluations), next_group=taken
    )
    controller = controller_of(world, config, resume_state)
    if (stream := controller.ports.replay) is not None:
        groups = range(start * config.schedule.prompts_per_step)
        stream.restore(
            [TeacherQueryRecord(group, [], ReplayOutcome(), []) for group in groups], len(groups)
        )
    await controller.run()
    return controller


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.startswith("time/")}


async def test_only_the_steps_after_the_checkpoint_are_trained(
    world: World, config: Config
) -> None:
    await resumed(world, config)
    assert [batch.step for batch in world.names("trained")] == [3, 4]
    groups = {trace.group_id for trace in world.names("stored")}
    assert groups == set(range(2 * START, 2 * STEPS))
    assert [metrics["step"] for metrics in world.names("metrics")] == [4, 5]


async def test_the_checkpoints_version_is_served_before_anything_is_sampled(
    world: World, config: Config
) -> None:
    await resumed(world, config)
    kinds = [kind for kind, _ in world.done]
    assert kinds.index("served") < kinds.index("begin")
    assert world.names("served")[0] == START
    for trace in world.names("stored"):
        assert trace.oldest_version() >= START


async def test_teachers_are_asked_about_the_groups_that_follow(
    world: World, config: Config
) -> None:
    await resumed(world, config)
    assert world.names("pair")


async def test_a_synchronous_run_goes_on_as_it_would_have_gone_on(
    world: World, build_config: Any, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    schedule = {"prompts_per_step": 2, "group_size": 3, "max_lag": 0}
    run = {"name": "unit", "seed": 3, "steps": STEPS}
    config = build_config(run=run, schedule=schedule, sdpo={"alpha": 0.5})
    other = World(toolbox, world.chat, seed=1)
    await finished(other, config)
    await resumed(world, config)
    whole = [untimed(metrics) for metrics in other.names("metrics")]
    assert [untimed(metrics) for metrics in world.names("metrics")] == whole[START:]


async def test_what_was_measured_before_is_not_measured_again(world: World, config: Config) -> None:
    before = (Evaluation(0, 0.25, 4),)
    controller = await resumed(world, config, before)
    assert world.names("measured") == [STEPS]
    assert [one.step for one in controller.evaluations] == [0, STEPS]


async def test_an_evaluation_that_was_due_at_the_checkpoint_is_made_up_for(
    world: World, config: Config
) -> None:
    due = config.model_copy(update={"eval": config.eval.model_copy(update={"every": START})})
    await resumed(world, due)
    assert world.names("measured") == [START, STEPS]


async def test_a_run_that_lacks_only_its_last_evaluation_makes_that(
    world: World, config: Config
) -> None:
    world.trained = STEPS
    await resumed(world, config, start=STEPS)
    assert world.names("trained") == []
    assert world.names("measured") == [STEPS]


async def test_checkpoints_are_saved_where_they_are_due_and_at_the_end(
    world: World, config: Config
) -> None:
    await resumed(world, config)
    assert world.names("saved") == [4, 5]
