"""Groups on their way: what is stored of them from before is taken as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from controller_world import World, rollouts_of

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_prompts import HintReply, HintRequest
from composer_mesh.rollouts.hint_sources import Written
from composer_mesh.rollouts.toolbox import ToolboxTask
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.schedule.resume_state import StoredGroup
from composer_mesh.services.schedule.step_builder import Group
from composer_mesh.services.steps.hint_writing import HintWriting, WordedHints

WORDS = WordedHints({("train-000001-000", 0): Written("Look.", "llm")}, 1, 0.5)


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
    def build(max_lag: int) -> Config:
        hints = {"writer": "llm", "llm": {"kind": "builtin"}}
        schedule = {"prompts_per_step": 2, "group_size": 2, "max_lag": max_lag}
        return build_config(schedule=schedule, sdpo={"alpha": 0.1, "hints": hints})

    return build


async def collected(world: Keeping, config: Config, stored: dict[int, StoredGroup]) -> list[Group]:
    hints = HintWriting(world, config, world.task, world.chat, lambda _: None)
    groups = Groups(config, world.task, rollouts_of(world, config), world, None, hints, stored)
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
