"""Samples of AsyncGRPOTrainer: TRL's own advantages, its batches, and none that is too old."""

import asyncio
import math
import queue
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hint_traces import group_of
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.plugins.frameworks.trl.async_stream import (
    RolloutBuffer,
    advantages_of,
    group_figures,
    group_samples,
    offer,
)
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
SCRIPTS = ("right", "stumbles", "fails twice", "quits")


@pytest.fixture
def group(tokenizer: Any, toolbox: ToolboxTask) -> list[Trace]:
    return group_of(toolbox, ChatFormat(tokenizer, toolbox.tools), 5, SCRIPTS)


def scored_by_trl(rewards: Sequence[float | None]) -> list[Any]:
    """What TRL's own worker makes of the rewards of a group."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import (
        RolloutGroup,
        TrainingSequence,
        _AsyncRolloutLoop,
    )

    PartialState(cpu=True)  # of accelerate, whose logger they use
    count = len(rewards)
    group = RolloutGroup(
        prompts=[[{"role": "user", "content": "?"}]] * count,
        reward_kwargs={},
        completions=[[]] * count,
        completions_ids=[[1]] * count,
        completions_sequences=[[TrainingSequence([0, 1], [0, 1], [0.0, -1.0], "r")]] * count,
        tool_call_counts=[0] * count,
        tool_failure_counts=[0] * count,
        model_version=1,
        group_id=0,
        env_rewards=[None] * count,
        rollout_rewards=[None] * count,
    )
    worker: Any = SimpleNamespace(
        reward_funcs=[lambda **_: list(rewards)],
        reward_func_names=["reward"],
        _env_reward_types=[],
        _provides_rollout_reward=False,
    )
    return asyncio.run(_AsyncRolloutLoop._score_group(worker, group))


@pytest.mark.parametrize(
    "rewards",
    [
        [0.0, 1.0, 0.25, 1.0],
        [0.5, 0.5, 0.5],
        [0.0, None, 1.0],
        [None, None],
        [0.1, 0.1, 0.1 + 1e-12],
    ],
)
def test_advantages_are_those_of_trls_own_worker(rewards: list[float | None]) -> None:
    found, deviation = advantages_of([math.nan if one is None else one for one in rewards])
    theirs = scored_by_trl(rewards)
    assert found == [one.advantage for one in theirs]
    assert deviation == pytest.approx(theirs[0].metrics["reward_std"], nan_ok=True, abs=0)


def test_a_sample_has_the_ids_masks_and_logprobs_of_a_rollout_of_several_turns(
    group: list[Trace],
) -> None:
    samples = group_samples(5, group)
    assert [one.group_id for one in samples] == [5] * 4
    for sample, trace in zip(samples, group, strict=True):
        mask = sample.completion_mask.astype(bool)
        turns = trace.turns
        assert sample.input_ids.tolist() == trace.token_ids()
        assert sample.input_ids[mask].tolist() == [i for turn in turns for i in turn.action_ids]
        assert sample.old_log_probs[mask].tolist() == [p for turn in turns for p in turn.logprobs]
        assert not sample.old_log_probs[~mask].any()
        assert [*sample.prompt, *sample.completion] == trace.messages
        assert sample.completion[0]["role"] == "assistant"
    assert len(group[1].turns) > 2
    advantages, deviation = advantages_of([trace.reward for trace in group])
    assert [one.advantage for one in samples] == advantages
    assert {one.metrics["reward_std"] for one in samples} == {deviation}
    assert [one.metrics["rollouts/success"] for one in samples] == [1, 1, 0, 0]
    assert [one.metrics["reward"] for one in samples] == [trace.reward for trace in group]


def test_the_version_of_a_sample_is_that_of_its_oldest_token(group: list[Trace]) -> None:
    first, *rest = group[1].turns
    later = [replace(turn, versions=[4] * len(turn.action_ids)) for turn in rest]
    mixed = [3] * (len(first.action_ids) - 1) + [4]
    trace = replace(group[1], turns=[replace(first, versions=mixed), *later])
    (sample,) = group_samples(0, [trace])
    assert sample.model_version == 3


def test_tool_calls_and_those_that_failed_are_counted_as_trl_counts_them(
    group: list[Trace],
) -> None:
    right, stumbles, *_ = (one.metrics for one in group_samples(5, group))
    assert right["tools/call_frequency"] > 0 == right["tools/failure_frequency"]
    calls = stumbles["tools/call_frequency"]
    assert stumbles["tools/failure_frequency"] == pytest.approx(1 / calls)


def test_a_screened_rollout_and_turns_that_are_not_trained_have_no_part_in_the_loss(
    group: list[Trace],
) -> None:
    screened = replace(group[0], screened=True)
    quiet = replace(group[3], turns=[replace(turn, trained=False) for turn in group[3].turns])
    samples = group_samples(5, [screened, *group[1:3], quiet])
    assert len(samples) == 3
    assert samples[0].advantage == 0.0
    assert math.isnan(samples[0].metrics["reward"])
    rewards = [math.nan, group[1].reward, group[2].reward, quiet.reward]
    assert [one.advantage for one in samples] == advantages_of(rewards)[0][:3]


def test_further_trajectories_are_samples_that_are_compared_with_their_like(
    group: list[Trace],
) -> None:
    helpers = [
        replace(trace, trace_id=f"{trace.trace_id}-helper", role="helper", reward=reward)
        for trace, reward in zip(group, (0.0, 1.0, 0.0, 1.0), strict=True)
    ]
    own = replace(group[0], trace_id="own", advantage=0.75)
    both = [replace(one, others=[other]) for one, other in zip(group, helpers, strict=True)]
    both[0] = replace(both[0], others=[helpers[0], own])
    samples = group_samples(5, both)
    by_reward = advantages_of([0.0, 1.0, 0.0, 1.0])[0]
    assert len(samples) == 9
    assert [samples[place].advantage for place in (1, 4, 6, 8)] == by_reward
    assert samples[2].advantage == 0.75
    turns = replace(own, advantage=None, turn_advantages=[1.0] * len(own.turns))
    with pytest.raises(ValueError, match="own has one advantage for each turn"):
        group_samples(5, [replace(group[0], others=[turns])])


def test_figures_are_reduced_by_trl_to_means_sums_and_extremes(group: list[Trace]) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import _reduce_metric

    figures = [group_figures(group[:2]), group_figures(group[2:])]
    found = {name: _reduce_metric(name, [one[name] for one in figures]) for name in figures[0]}
    turns = [len(trace.turns) for trace in group]
    assert found["rollout/turns_mean"] == pytest.approx(np.mean(turns))
    assert found["rollout/turns_max"] == max(turns)
    assert found["completions/clipped_ratio"] == 0
    assert found["completions/min_length"] <= found["completions/mean_length"]
    assert group_figures([]) == {}


def test_a_trainer_that_takes_no_figures_stops_no_rollouts() -> None:
    metrics: queue.Queue[Any] = queue.Queue(1)
    offer(metrics, {"a": 1.0})
    offer(metrics, {"b": 1.0})
    assert metrics.get_nowait() == {"a": 1.0}


def filled(versions: Sequence[int], newest: int, group: list[Trace]) -> tuple[Any, list[int]]:
    """A buffer with samples of these versions, and how many were left at each taking."""
    left: list[int] = []
    buffer = RolloutBuffer(2, lambda: left.append(buffer.qsize()))
    (sample,) = group_samples(0, group[:1])
    for version in versions:
        buffer.put_nowait(replace(sample, model_version=version))
    buffer.model_version = newest
    return buffer, left


def test_a_sample_that_is_too_old_is_never_handed_over(group: list[Trace]) -> None:
    buffer, left = filled([1, 2, 3, 2, 5], 5, group)
    assert buffer.get(timeout=60.0).model_version == 3
    assert buffer.get_nowait().model_version == 5
    assert (buffer.dropped, left) == (3, [4, 3, 2, 1, 0])
    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.0)


def test_trls_own_queue_batcher_and_collator_take_the_samples(group: list[Trace]) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )

    buffer: Any = RolloutBuffer(2, lambda: None)
    for sample in group_samples(5, group):
        buffer.put_nowait(sample)
    metrics: dict[str, list[Any]] = defaultdict(list)
    dataset = RolloutQueueDataset(buffer, lambda: 2, lambda _: None, 60.0, metrics)
    collate = DataCollatorForRollout(pad_token_id=0, metrics=metrics)
    batch = collate([next(iter(FixedCountBatcher(dataset, 1, len(group))))])
    trained = sum(len(turn.action_ids) for trace in group for turn in trace.turns)
    assert int(batch["global_n_tokens"][0]) == trained == batch["old_log_probs"].numel()
    assert torch.equal(batch["old_log_probs"], torch.full((1, trained), -1.0))
    assert metrics["sample/staleness_max"] == [2.0] * len(group)
    assert metrics["rollouts/success"] == [0.5]
    assert collate.groups_trained == {5}


@given(
    steps=st.integers(1, 4),
    size=st.integers(1, 4),
    lag=st.integers(1, 3),
    rng=st.randoms(use_true_random=False),
)
def test_with_so_many_rollouts_at_once_none_is_too_old_when_it_is_taken(
    steps: int, size: int, lag: int, rng: Any
) -> None:
    """The proof of the module, on groups that finish in any order and are handed over in theirs."""
    a_step = steps * size
    most, version, entered, handed, waiting = lag * a_step, 1, 0, 0, list[int]()
    versions, finished = list[int](), set[int]()
    for _ in range(12):
        for _ in range(a_step):
            while not waiting:
                while (entered - handed + 1) * size + len(waiting) <= most:
                    versions.append(version)
                    entered += 1
                finished.add(rng.choice([g for g in range(handed, entered) if g not in finished]))
                while handed in finished:
                    waiting += [versions[handed]] * size
                    handed += 1
            assert version - waiting.pop(0) <= lag
            while (entered - handed + 1) * size + len(waiting) <= most:
                versions.append(version)
                entered += 1
        version += 1
