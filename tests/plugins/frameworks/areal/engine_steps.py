"""Three optimizer steps of all channels in AReaL's FSDPEngine on a CPU; prints them, and ours."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from areal.api import FinetuneSpec
from areal.api.cli_args import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from fake_areal import row_of
from learning import config
from step_batches import ALL_ON, batch_of

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.plugins.frameworks.areal_training import ArealChannels, areal_step

CAP = {"upper": 1000.0}


def main() -> None:
    folder = Path(sys.argv[1])
    model = load_model(folder)
    batch = batch_of(model, random.Random(2), samples=5, pairs=3)
    engine = FSDPEngine(
        TrainEngineConfig(
            experiment_name="t",
            trial_name="t",
            path=str(folder),
            backend="fsdp:d1",
            dtype="float32",
            attn_impl="sdpa",
            gradient_checkpointing=False,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=64),
            optimizer=OptimizerConfig(
                type="sgd", lr=0.05, gradient_clipping=1e9, warmup_steps_proportion=0.0
            ),
            fsdp=FSDPEngineConfig(),
        )
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 64, 8))
    engine.train()
    places = {one.trace_id: place for place, one in enumerate(batch.samples)}
    views: dict[int, list[Any]] = {}
    for view in batch.views:
        views.setdefault(places[view.trace_id], []).append(view)
    channels = ArealChannels(alpha=0.5, beta=0.3, ppo={"rejection_sampling": CAP})
    rows = [row_of(model, one) for one in batch.samples]
    steps = [areal_step(engine, rows, views, batch.pairs, channels) for _ in range(3)]
    print(json.dumps([steps, our_step(model, batch)]))


def our_step(model: Any, batch: Any) -> dict[str, Any]:
    """Our own step on the same weights and batch."""
    from composer_mesh.configs.schema import Config

    table = config().model_dump(mode="json", exclude_none=True)
    table |= {
        "loss": {"type": "decoupled_ppo", "rejection": CAP},
        "sdpo": {"alpha": 0.5, "placement": "inline"},
        "replay": {**ALL_ON["replay"], "beta": 0.3},
    }
    settings = Config.model_validate(table)
    step = OptimizerStep(
        model, None, settings, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=0.05)]
    )
    teacher = TeacherModel(model, settings.sdpo, 4096, follows=True)
    found = step.run(batch, InlineSource(teacher, settings.sdpo, batch.version))
    return {name: one for name, one in found.items() if isinstance(one, float | int)}


main()
