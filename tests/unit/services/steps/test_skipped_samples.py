"""Samples whose loss is 0 are left out of a batch, unless something else needs their forward.

Steps with few rollouts or none: what was given up is missing, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hint_traces import group_of as played_group

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import Skipped, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.schedule.metrics import step_metrics
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.tasks.toolbox import ToolboxTask

Batched = Callable[..., StepBatch]


def group_of(group_id: int, *rewards: float) -> list[Trace]:
    turn = Turn([1, 2], [3, 4], [-1.0, -2.0], [0, 0], "stop")
    name = f"t-{group_id}"
    return [
        Trace(f"{name}-{n}", group_id, n, "toolbox", "train", 0, [turn], [], reward, False, [])
        for n, reward in enumerate(rewards)
    ]


GROUPS = [group_of(0, 1.0, 1.0, 1.0), group_of(1, 0.0, 1.0), group_of(2, 0.0, 0.0)]


@pytest.fixture
def batched(build_config: Callable[..., Config], toolbox: ToolboxTask, tokenizer: Any) -> Batched:
    def batch(groups: Sequence[Sequence[Trace]] = GROUPS, **sections: Any) -> StepBatch:
        config = build_config(**sections)
        chat = ChatFormat(tokenizer, toolbox.tools)
        return Batcher(config, toolbox, chat, make_advantages(config.advantage), print).batch(
            0, groups, []
        )

    return batch


def names(batch: StepBatch) -> list[str]:
    return [sample.trace_id for sample in batch.samples]


def test_the_samples_of_groups_without_an_advantage_are_left_out_and_counted(
    batched: Batched,
) -> None:
    batch = batched()
    assert names(batch) == ["t-1-0", "t-1-1"]
    assert batch.skipped == Skipped(sequences=5, tokens=10)


def test_the_counts_that_losses_are_divided_by_include_what_is_left_out(batched: Batched) -> None:
    batch = batched()
    whole = batched(logprob_mismatch={"all_tokens": True})
    assert len(whole.samples) == 7
    assert (batch.sequences, batch.action_tokens) == (7, 14)
    assert (whole.sequences, whole.action_tokens) == (7, 14)


@pytest.mark.parametrize(
    "needs",
    [
        {"loss": {"entropy_coef": 0.01}},
        {"loss": {"kl_beta": 0.01}},
        {"loss": {"type": "prime_rl"}},
        {"loss": {"type": "prime_rl", "kl_tau": 0.0, "teacher_tau": 0.1}},
        {"loss": {"type": "prime_rl_ipo"}},
        {"loss": {"type": "custom", "import_path": "any.loss"}},
        {"logprob_mismatch": {"all_tokens": True}},
    ],
    ids=str,
)
def test_nothing_is_left_out_where_something_else_needs_its_forward(
    batched: Batched, needs: dict[str, Any]
) -> None:
    batch = batched(**needs)
    assert len(batch.samples) == 7
    assert batch.skipped == Skipped()


def test_a_sample_with_a_hinted_view_is_kept(
    batched: Batched, toolbox: ToolboxTask, tokenizer: Any
) -> None:
    chat = ChatFormat(tokenizer, toolbox.tools)
    failing = played_group(toolbox, chat, 5, ["fails twice", "fails twice", "quits"])
    batch = batched([failing, GROUPS[0]], sdpo={"alpha": 0.5})
    viewed = {view.trace_id for view in batch.views}
    assert viewed
    assert set(names(batch)) == viewed
    assert batch.skipped.sequences == len(failing) + 3 - len(viewed) > 0


ADVANTAGES: list[dict[str, Any]] = [
    *({"type": "group", "scale": scale} for scale in ("group", "batch", "none")),
    {"type": "rloo"},
    {"type": "max_rl"},
    *({"type": "reinforce_plus_plus", "baseline": baseline} for baseline in (True, False)),
]


@pytest.mark.parametrize("advantage", ADVANTAGES, ids=str)
def test_a_step_without_any_rollout_makes_an_empty_batch(
    build_config: Any, toolbox: ToolboxTask, tokenizer: Any, advantage: dict[str, Any]
) -> None:
    config = build_config(advantage=advantage, sdpo={"alpha": 0.5})
    chat = ChatFormat(tokenizer, toolbox.tools)
    batcher = Batcher(config, toolbox, chat, make_advantages(config.advantage), print)
    batch = batcher.batch(3, [[], []], [])
    assert (batch.samples, batch.views, batch.pairs) == ([], [], [])
    metrics = step_metrics(batch, [], None, Corrections(), {"loss/total": 0.0})
    assert metrics["rollouts/count"] == 0
    assert metrics["lag/max"] == 0


@pytest.mark.parametrize("channels", [{}, {"sdpo": {"alpha": 0.5}}])
def test_an_empty_batch_leaves_the_weights_as_they_are(
    make: Callable[..., Any], channels: dict[str, Any]
) -> None:
    model, step = make(**channels)
    before = [weights.clone() for weights in model.parameters()]
    metrics = step.run(StepBatch(0, [], [], []), None)
    assert all(map(torch.equal, before, model.parameters()))
    assert metrics["loss/total"] == 0.0
    assert metrics["loss/policy"] is None
    assert metrics["policy/grad_norm"] == 0.0
    assert metrics["tokens/trained"] == 0
