"""The alarm: which differences raise it, how often it is told, and how it ends a run."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from controller_world import World, controller_of

from composer_mesh.configs.logprob_mismatch import LogprobMismatchConfig
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.steps.logprob_mismatch import (
    LogprobMismatchMonitor,
    LogprobMismatchTooLarge,
)
from composer_mesh.tasks.toolbox import ToolboxTask

FLOAT32 = {"same_version/mean": 1e-6, "same_version/max": 2e-5, "mean": 0.02, "max": 0.9}


class Events:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.told.append((kind, detail, fields))


def step_of(step: int, **figures: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in figures.items()}
    return {"step": step} | {f"logprob_mismatch/{n}": v for n, v in (FLOAT32 | named).items()}


@pytest.mark.parametrize(
    ("figures", "key"),
    [
        ({"same_version__mean": 0.06}, "alarm_mean"),
        ({"same_version__max": 2.2}, "alarm_max"),
        ({"mean": 0.7}, "alarm_lagged_mean"),
    ],
)
def test_each_bound_has_its_alarm_with_value_bound_and_repair(
    figures: dict[str, float], key: str
) -> None:
    events = Events()
    assert (
        LogprobMismatchMonitor(LogprobMismatchConfig(), events).judge(step_of(7, **figures)) is None
    )
    [(kind, detail, fields)] = events.told
    (value,) = figures.values()
    assert kind == "logprob_mismatch_alarm"
    assert detail.startswith(f"step 7: trainer and generators differ by {value:.3g} nats")
    assert f"raise logprob_mismatch.{key}" in detail
    assert fields["step"] == 7
    assert value in fields.values()


def test_neither_float32_nor_policy_lag_raises_an_alarm() -> None:
    events = Events()
    watch = LogprobMismatchMonitor(LogprobMismatchConfig(), events)
    for step in range(1, 100):
        watch.judge(step_of(step))
    watch.judge({"step": 100})
    watch.judge({"step": 101, "logprob_mismatch/mean": 0.3, "logprob_mismatch/max": 9.0})
    assert events.told == []


def test_alarms_of_the_cool_down_are_told_by_the_next_one() -> None:
    events = Events()
    watch = LogprobMismatchMonitor(LogprobMismatchConfig(cooldown_steps=4), events)
    for step in range(1, 10):
        watch.judge(step_of(step, same_version__max=0.0 if step in (3, 6, 7) else 3.0))
    assert [fields["step"] for _, _, fields in events.told] == [1, 5, 9]
    assert events.told[1][1].endswith("(and in 2 steps since the alarm before)")
    assert events.told[2][1].endswith("(and in 1 steps since the alarm before)")


def test_an_alarm_that_stops_is_returned_and_recorded() -> None:
    events = Events()
    watch = LogprobMismatchMonitor(LogprobMismatchConfig(on_alarm="stop"), events)
    error = watch.judge(step_of(4, same_version__mean=0.3))
    assert isinstance(error, LogprobMismatchTooLarge)
    assert str(error) == events.told[0][1]
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.args, str(copy)) == (error.args, str(error))


class Disagreeing(World):
    """A world whose third step measures engines that disagree."""

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        found = await super().train(batch)
        return found | {"logprob_mismatch/same_version/mean": 0.9 if batch.step == 2 else 0.0}


@pytest.fixture
def world(tokenizer: Any, toolbox: ToolboxTask) -> World:
    return Disagreeing(toolbox, ChatFormat(tokenizer, toolbox.tools))


async def test_a_run_that_an_alarm_ends_has_saved_the_step_before(
    world: World, build_config: Any
) -> None:
    config = build_config(run={"name": "unit", "steps": 5}, logprob_mismatch={"on_alarm": "stop"})
    controller = controller_of(world, config)
    watch = LogprobMismatchMonitor(config.logprob_mismatch, world.event)
    controller.ports = replace(controller.ports, logprob_mismatch=watch)
    with pytest.raises(LogprobMismatchTooLarge, match="step 3: "):
        await controller.run()
    order = [
        kind for kind, _ in world.done if kind in ("metrics", "saved", "logprob_mismatch_alarm")
    ]
    assert order == ["metrics"] * 3 + ["logprob_mismatch_alarm", "saved"]
    assert world.names("saved") == [3]


async def test_a_run_that_is_only_warned_goes_on(world: World, build_config: Any) -> None:
    config = build_config(run={"name": "unit", "steps": 5})
    controller = controller_of(world, config)
    watch = LogprobMismatchMonitor(config.logprob_mismatch, world.event)
    controller.ports = replace(controller.ports, logprob_mismatch=watch)
    await controller.run()
    assert len(world.names("logprob_mismatch_alarm")) == 1
    assert world.names("saved") == [5]
