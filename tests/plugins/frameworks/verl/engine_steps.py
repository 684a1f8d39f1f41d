"""Optimizer steps of all channels in verl's FSDP2 engine on a CPU; prints them, and ours."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

import cpu_engine
import torch
from learning import config
from step_batches import ALL_ON, batch_of
from verl.workers.config import FSDPActorConfig
from verl_rows import row_of, views_of

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.frameworks.verl.losses import VerlChannels
from composer_mesh.plugins.frameworks.verl.steps import verl_pair_step, verl_step

RATE = 0.05


def actor() -> Any:
    """verl's own config of an actor, with a policy loss of ours by its name."""
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        policy_loss={"loss_mode": "composer_grpo"},
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        loss_agg_mode="token-mean",
    )


def our_step(model: Any, batch: Any) -> Any:
    table = config().model_dump(mode="json", exclude_none=True)
    table["trainer"] |= {"lr": RATE, "grad_clip": 1e9}
    table |= {
        "loss": {"type": "grpo", "clip_low": 0.2, "clip_high": 0.2},
        "sdpo": {"alpha": 0.5, "placement": "inline"},
        "replay": {**ALL_ON["replay"], "beta": 0.3},
    }
    settings = Config.model_validate(table)
    step = OptimizerStep(
        model, None, settings, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=RATE)]
    )
    teacher = TeacherModel(model, settings.sdpo, 4096, follows=True)
    found = step.run(batch, InlineSource(teacher, settings.sdpo, batch.version))
    return {name: one for name, one in found.items() if isinstance(one, float | int)}


def difference(engine: Any, model: Any) -> float:
    """The largest difference of a weight between the engine's model and ours."""
    theirs = dict(engine.get_per_tensor_param()[0])
    ours = dict(model.named_parameters())
    return max(
        float((one.detach() - theirs[name].float()).abs().max()) for name, one in ours.items()
    )


def main() -> None:
    folder = Path(sys.argv[1])
    rank, ranks = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    model = load_model(folder)
    batch = batch_of(model, random.Random(2), samples=5, pairs=3)
    rows = [row_of(one, views_of(batch, one)) for one in batch.samples][rank::ranks]
    pairs = batch.pairs[rank::ranks]
    channels, found = VerlChannels(alpha=0.5, beta=0.3), {}
    engine = cpu_engine.engine_on_cpu(folder, RATE)
    with engine.train_mode():
        steps = [verl_step(engine, rows, pairs, channels, actor())]
        ours = our_step(model, batch)
        found["difference"] = difference(engine, model)
        steps += [verl_step(engine, rows, pairs, channels, actor()) for _ in range(2)]
        narrow = VerlChannels(alpha=0.5, top_k=20)
        found["top_k"] = verl_step(engine, rows, [], narrow, actor())
        found["pairs"] = [verl_pair_step(engine, pairs, channels) for _ in range(2)]
    if rank == 0:
        print(json.dumps({**found, "steps": steps, "ours": ours}))


if __name__ == "__main__":
    main()
