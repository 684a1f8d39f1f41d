"""Advantages of turns through a step: traces, batch, late rewards and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.schedule.step_builder import Group, StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import WrittenHints
from composer_mesh.services.steps.step_manifest import manifest_from_json, manifest_to_json
from composer_mesh.services.store.rows import LateReward
from composer_mesh.tasks.toolbox import ToolboxTask

Build = Callable[..., Config]
RETURNS = {"type": "turn_returns", "scale": "none", "gamma": 0.5}


def trace_of(name: str, turn_rewards: list[float], outcome: float) -> Trace:
    turns = [Turn([1, 2], [3, 4], [-1.0, -1.0], [0, 0], "stop") for _ in turn_rewards]
    reward = outcome + sum(turn_rewards)
    trace = Trace(name, 0, 0, "toolbox", "train", 0, turns, [], reward, False, [])
    return replace(trace, turn_rewards=turn_rewards)


GROUP = [trace_of("a", [1.0, 0.0, 0.0], 4.0), trace_of("b", [2.0, 3.0], 5.0)]
"""Returns by turn with a discount of 1/2: 2, 2, 4 and 6, 8."""


@pytest.fixture
def batch_of(build_config: Build, toolbox: ToolboxTask, tokenizer: Any) -> Callable[..., StepBatch]:
    chat = ChatFormat(tokenizer, toolbox.tools)

    def build(groups: list[list[Trace]], **sections: Any) -> StepBatch:
        config = build_config(**sections)
        batcher = Batcher(config, toolbox, chat, make_advantages(config.advantage), print)
        return batcher.batch(0, groups, [])

    return build


def by_turn(batch: StepBatch) -> dict[str, list[float]]:
    """The advantage of each trained id."""
    found = {}
    for one in batch.samples:
        assert isinstance(one.advantage, list)
        found[one.trace_id] = [a for a, own in zip(one.advantage, one.mask, strict=True) if own]
    return found


def test_each_turns_ids_get_the_advantage_of_the_turn(batch_of: Any) -> None:
    found = by_turn(batch_of([GROUP], advantage=RETURNS))
    assert found == {"a": [-2, -2, -3, -3, 0, 0], "b": [2, 2, 3, 3]}


def test_a_turn_that_is_only_context_has_no_advantage(batch_of: Any) -> None:
    first, *rest = GROUP[1].turns
    group = [GROUP[0], replace(GROUP[1], turns=[replace(first, trained=False), *rest])]
    sample = batch_of([group], advantage=RETURNS).samples[1]
    assert sample.advantage == [0, 0, 0, 0, 0, 0, 3, 3]


def test_equal_turns_and_states_of_the_config_reach_the_functions(batch_of: Any) -> None:
    mt = {"type": "mt_grpo", "scale": "none", "outcome_weight": 0.0}
    assert by_turn(batch_of([GROUP], advantage=mt))["b"] == [0.5, 0.5, 2.0, 2.0]
    gigpo = {"type": "gigpo", "scale": "none", "gamma": 0.5}
    by_history = by_turn(batch_of([GROUP], advantage={**gigpo, "state": "history"}))
    # All histories are alike here, turn by turn; totals are 5 and 10.
    assert by_history["b"] == [2.5 + 2, 2.5 + 2, 2.5 + 3, 2.5 + 3]
    same = by_turn(batch_of([GROUP], advantage=gigpo))
    mean = (2 + 2 + 4 + 6 + 8) / 5
    assert same["a"][::2] == pytest.approx([-2.5 + 2 - mean, -2.5 + 2 - mean, -2.5 + 4 - mean])


def test_advantages_of_rollouts_count_rewards_of_turns_as_parts_of_the_reward(
    batch_of: Any,
) -> None:
    found = batch_of([GROUP], advantage={"scale": "none"})
    assert [sample.advantage for sample in found.samples] == [-2.5, 2.5]


def test_advantages_that_a_workflow_gives_turns_are_compared_with_none(batch_of: Any) -> None:
    own = replace(GROUP[0], turn_advantages=[0.5, 0.0, -1.0])
    found = batch_of([[own, GROUP[1]]])
    assert found.samples[0].advantage == [0, 0, 0.5, 0.5, 0, 0, 0, 0, 0, 0, -1, -1]
    assert found.skipped.sequences == 1, "the other one is alone, and its advantage is 0"


def test_a_sample_is_left_out_only_if_all_of_its_turns_have_advantage_0(batch_of: Any) -> None:
    zeros = replace(GROUP[0], turn_advantages=[0.0, 0.0, 0.0])
    one = replace(GROUP[1], turn_advantages=[0.0, 1e-3])
    found = batch_of([[zeros, one]])
    assert [sample.trace_id for sample in found.samples] == ["b"]
    assert found.skipped.tokens == 6


WHOLE_ROLLOUTS = [
    {"type": "gmpo"},
    {"type": "vespo"},
    {"ratio_level": "sequence"},
    {"type": "cispo", "ratio_level": "sequence"},
    {"type": "sapo", "ratio_level": "sequence"},
    {"type": "decoupled_ppo", "ratio_level": "sequence"},
    {"off_policy_threshold": 0.5},
]


@pytest.mark.parametrize("loss", WHOLE_ROLLOUTS, ids=str)
@pytest.mark.parametrize("advantage", ["turn_returns", "mt_grpo", "gigpo"])
def test_a_loss_of_whole_rollouts_is_refused_for_advantages_of_turns(
    build_config: Build, loss: dict[str, Any], advantage: str
) -> None:
    with pytest.raises(ValidationError, match=f"'{advantage}', which gives each turn its own"):
        build_config(loss=loss, advantage={"type": advantage})


@pytest.mark.parametrize("loss", WHOLE_ROLLOUTS, ids=str)
def test_a_workflows_advantages_of_turns_are_refused_by_a_loss_of_whole_rollouts(
    batch_of: Any, loss: dict[str, Any]
) -> None:
    own = replace(GROUP[0], turn_advantages=[0.5, 0.0, -1.0])
    with pytest.raises(ValueError, match="the workflow gave a turn_advantages, but loss"):
        batch_of([[own]], loss=loss)
    assert batch_of([GROUP], loss=loss).samples


def test_a_late_reward_changes_the_advantages_of_turns_and_is_rebuilt_from_the_manifest(
    build_config: Build, toolbox: ToolboxTask, tokenizer: Any
) -> None:
    config = build_config(advantage=RETURNS, late_rewards={"max_age": 3})
    chat = ChatFormat(tokenizer, toolbox.tools)
    posted: list[LateReward] = []

    def builder() -> StepBuilder:
        advantages = make_advantages(config.advantage)
        late = LateRewards(lambda: posted, advantages, 3, lambda _: None)
        return StepBuilder(Batcher(config, toolbox, chat, advantages, print), late)

    one, again = builder(), builder()
    groups = [Group(0, GROUP, WrittenHints())]
    _, first = one.compose(0, groups, None, {})
    posted.append(LateReward(0, "a", 13.0, ""))  # an outcome of 12 in place of 4
    planned, manifest = one.compose(1, [], None, {})
    assert by_turn(planned.batch) == {"a": [1, 1, 2, 2, 0, 0], "b": [-1, -1, -2, -2]}
    read = manifest_from_json(1, manifest_to_json(manifest))
    assert read == manifest
    again.remember(first, groups)
    assert again.again(read, [], []).batch == planned.batch


def test_a_custom_function_sees_rewards_of_turns() -> None:
    from composer_mesh.services.steps.advantages import shown_rollout

    assert shown_rollout(GROUP[1])["turn_rewards"] == [2.0, 3.0]
