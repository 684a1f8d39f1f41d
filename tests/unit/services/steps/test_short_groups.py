"""Steps with few rollouts or none: what was given up is missing, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.schedule.metrics import step_metrics
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.tasks.toolbox import ToolboxTask

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
