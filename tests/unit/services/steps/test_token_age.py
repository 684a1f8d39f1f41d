"""Tokens that are too old when their group is trained: context only, in every channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hint_traces import group_of as played_group

from composer_mesh.channels.policy import policy_sample
from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.schedule.metrics import step_metrics
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.tasks.toolbox import ToolboxTask

STEP = 6
SCHEDULE = {"max_lag": 1, "carried_groups": 2, "max_token_age": 2}
Batched = Callable[..., StepBatch]


@pytest.fixture
def chat(toolbox: ToolboxTask, tokenizer: Any) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


@pytest.fixture
def group(toolbox: ToolboxTask, chat: ChatFormat) -> list[Trace]:
    """Rollouts with an error; the first turn is of version 0, and each later one of a newer one."""
    played = played_group(toolbox, chat, 5, ["fails twice", "fails twice", "right"])
    return [aged(trace, [0, *range(STEP - 3, STEP)]) for trace in played]


def aged(trace: Trace, versions: Sequence[int]) -> Trace:
    """The trace with these versions, turn by turn; later turns have the last one."""
    at = [versions[min(n, len(versions) - 1)] for n in range(len(trace.turns))]
    turns = [
        replace(turn, versions=[version] * len(turn.action_ids))
        for turn, version in zip(trace.turns, at, strict=True)
    ]
    return replace(trace, turns=turns)


@pytest.fixture
def batched(build_config: Callable[..., Config], toolbox: ToolboxTask, chat: ChatFormat) -> Batched:
    def batch(
        groups: Sequence[Sequence[Trace]],
        schedule: dict[str, Any] = SCHEDULE,
        corrections: Sequence[PolicySample] = (),
    ) -> StepBatch:
        config = build_config(schedule=schedule, sdpo={"alpha": 0.5, "advantage_sites": 0})
        batcher = Batcher(config, toolbox, chat, make_advantages(config.advantage), print)
        return batcher.batch(STEP, groups, [], corrections=corrections)

    return batch


def trained_versions(sample: PolicySample) -> set[int]:
    return {one for one, on in zip(sample.versions, sample.mask, strict=True) if on}


def test_no_token_that_is_too_old_is_trained_or_counted(
    batched: Batched, group: list[Trace]
) -> None:
    batch = batched([group])
    assert batch.samples
    tokens = [v for trace in group for v in trace.versions() if v >= STEP - 2]
    assert batch.counts().action_tokens == len(tokens) > 0
    for sample in batch.samples:
        assert min(trained_versions(sample)) >= STEP - 2
        rows = zip(sample.logprobs, sample.versions, sample.mask, strict=True)
        assert {(p, version) for p, version, on in rows if not on} == {(0.0, -1)}
    metrics = step_metrics(batch, group, None, Corrections(), {})
    assert metrics["tokens/aged"] == sum(len(trace.versions()) for trace in group) - len(tokens)
    assert metrics["lag/max"] == 2


def test_a_turn_with_a_token_that_is_too_old_gets_no_hint(
    batched: Batched, group: list[Trace]
) -> None:
    everything = batched([group], {"max_lag": 1})
    assert min(view.turn for view in everything.views) == 0
    young = batched([group])
    assert all(
        min(trace.turns[view.turn].versions) >= STEP - 2
        for view in young.views
        for trace in group
        if trace.trace_id == view.trace_id
    )
    assert len(young.views) < len(everything.views)


def test_a_rollout_without_a_young_token_is_left_out_and_its_reward_still_compared(
    batched: Batched, group: list[Trace]
) -> None:
    old, *others = group
    batch = batched([[aged(old, [0]), *others]])
    younger = batched([group])
    before = {sample.trace_id: sample.advantage for sample in younger.samples}
    assert old.trace_id not in {sample.trace_id for sample in batch.samples}
    assert old.trace_id in before
    assert batch.skipped.sequences == younger.skipped.sequences + 1
    assert batch.skipped.tokens == younger.skipped.tokens == 0
    assert all(sample.advantage == before[sample.trace_id] for sample in batch.samples)


def test_a_late_correction_trains_young_tokens_only(batched: Batched, group: list[Trace]) -> None:
    late = [policy_sample(group[0], 0.5), policy_sample(aged(group[0], [0]), 0.5)]
    by_turn = policy_sample(group[0], [0.5] * len(group[0].turns))
    batch = batched([], corrections=[*late, by_turn])
    assert len(batch.samples) == 2
    assert batch.skipped.sequences == 1
    for sample in batch.samples:
        assert min(trained_versions(sample)) >= STEP - 2
    advantages = batch.samples[1].advantage
    assert isinstance(advantages, list)
    assert [bool(one) for one in advantages] == batch.samples[1].mask


@pytest.mark.parametrize(("carried", "oldest"), [(1, 8), (2, 8), (3, 7)])
def test_by_default_no_group_that_was_not_passed_over_loses_a_token(
    carried: int, oldest: int
) -> None:
    """It may be as old as max_lag and the steps that carried groups fill."""
    schedule = ScheduleConfig(prompts_per_step=2, max_lag=1, carried_groups=carried)
    assert schedule.oldest_trained(10) == oldest


def test_without_carried_groups_the_window_alone_bounds_the_age(
    batched: Batched, group: list[Trace]
) -> None:
    batch = batched([group], {"max_lag": 1})
    assert batch.oldest is None
    assert batch.counts().action_tokens == sum(len(trace.versions()) for trace in group)
    assert "tokens/aged" not in step_metrics(batch, group, None, Corrections(), {})
