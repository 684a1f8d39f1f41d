"""A step from its recipe is the step that was composed, to the last number of its metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.schedule.step_builder import Group, StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import WrittenHints
from composer_mesh.services.steps.step_manifest import (
    ReplayOutcome,
    manifest_from_json,
    manifest_to_json,
)
from composer_mesh.services.store.rows import LateReward
from composer_mesh.tasks.toolbox import ToolboxTask

FIGURES = {"rollouts/retried": 3, "rollouts/given_up": 1, "rollouts/poisoned": 0}


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(late_rewards={"max_age": 4})


def group_of(group_id: int, *rewards: float) -> Group:
    turn = Turn([1, 2], [3, 4], [-1.0, -2.0], [group_id, group_id], "stop")
    traces = [
        Trace(
            f"t-{group_id}-{n}", group_id, n, "toolbox", "train", 0, [turn], [], reward, False, []
        )
        for n, reward in enumerate(rewards)
    ]
    return Group(group_id, traces, WrittenHints())


GROUPS = [[group_of(0, 1.0, 0.0), group_of(1, 0.5, 0.25)], [group_of(2, 0.0, 1.0)]]
OUTCOMES = Counter(student_agrees=1, pair=3, tie=2)
TAKEN = TakenPairs([], ReplayOutcome(states=6, usd=0.1 + 0.2, outcomes=OUTCOMES), 1, 2, 0.7, 0.3, 4)


def composer_of(
    config: Config, tokenizer: Any, task: ToolboxTask, posted: list[LateReward]
) -> StepBuilder:
    advantages = make_advantages(config.advantage)
    late = LateRewards(lambda: posted, advantages, 4, lambda _: None)
    return StepBuilder(
        Batcher(config, task, ChatFormat(tokenizer, task.tools), advantages, print), late
    )


def test_steps_made_again_of_their_recipes_are_the_same(
    config: Config, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    posted: list[LateReward] = []
    step_builder = composer_of(config, tokenizer, toolbox, posted)
    first, manifest = step_builder.compose(0, GROUPS[0], TAKEN, FIGURES)
    posted += [LateReward(1, "t-0-1", 0.75, ""), LateReward(2, "t-2-0", 0.5, "")]
    second, following = step_builder.compose(1, GROUPS[1], None, {})
    assert second.corrections.samples
    assert second.traces[0].reward == 0.5
    again = composer_of(config, tokenizer, toolbox, [])
    for composed, of, groups in ((first, manifest, GROUPS[0]), (second, following, GROUPS[1])):
        read = manifest_from_json(of.step, manifest_to_json(of))
        found = again.again(read, groups, [])
        assert found.batch == composed.batch
        assert found.traces == composed.traces
        assert found.metrics({}) == composed.metrics({})
    assert (first.batch.success, first.batch.agreement, second.batch.agreement) == (0, 0.25, None)
    assert first.metrics({})["replay/agreement"] == 0.25
    assert first.metrics({})["rollouts/retried"] == 3
    assert first.metrics({})["replay/usd"] == 0.1 + 0.2


def test_a_correction_finds_its_rollout_in_a_step_that_is_only_known(
    config: Config, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    posted: list[LateReward] = []
    step_builder = composer_of(config, tokenizer, toolbox, posted)
    _, manifest = step_builder.compose(0, GROUPS[0], None, {})
    posted.append(LateReward(1, "t-0-1", 0.75, ""))
    second, following = step_builder.compose(1, GROUPS[1], None, {})
    again = composer_of(config, tokenizer, toolbox, [])
    again.remember(manifest, GROUPS[0])
    assert again.again(following, GROUPS[1], []).batch == second.batch
    with pytest.raises(KeyError, match="t-0-"):
        composer_of(config, tokenizer, toolbox, []).again(following, GROUPS[1], [])
