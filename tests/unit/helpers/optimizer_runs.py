"""A policy of which most weights have 8-bit state, steps of it, and checkpoints, on any ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step_batches import batch_of
from torch import Tensor

from composer_mesh.actors.checkpoints.manifest import write_manifest
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import build_model, build_tokenizer, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "optimizers", "seed": 3, "steps": 4},
    "data": {"task": "toolbox"},
    "environment": {"max_turns": 2},
    "policy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 400,
        "max_context": 64,
    },
    "generator": {"max_new_tokens": 10},
    "trainer": {"lr": 1e-3, "microbatch_tokens": 1024, "weight_decay": 0.1},
}


def config(**trainer: Any) -> Config:
    """A small run by the keys of the trainer's section."""
    return Config.model_validate(SECTIONS | {"trainer": {**SECTIONS["trainer"], **trainer}})


def write_policy(folder: Path) -> Any:
    """Write the initial policy; returns its model."""
    tokenizer = build_tokenizer([" ".join(dir(torch))] * 2, 400)
    model = build_model(config().policy, tokenizer, 1)
    save_policy(model.eval(), tokenizer, folder)
    return model


def batches(model: Any, count: int = 4) -> list[StepBatch]:
    """Steps of the policy channel."""
    rng = random.Random(0)
    return [replace(batch_of(model, rng), views=[], step=step) for step in range(count)]


def trained(learner: Learner, steps: Sequence[StepBatch]) -> dict[str, Tensor]:
    """Train steps and return the complete weights. All ranks together."""
    for batch in steps:
        learner.train(batch, None)
    return complete(learner.export())


def complete(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of complete tensors. All ranks together."""
    wholes = {n: one.full_tensor() if is_dtensor(one) else one for n, one in tensors.items()}
    return {name: whole.detach().clone() for name, whole in wholes.items()}


def state_of(learner: Learner) -> dict[str, Tensor]:
    """The complete optimizer state, as it is stored. All ranks together."""
    return complete(learner.step.optimizer_state())


def save(learner: Learner, ranks: Ranks, checkpoint: Path) -> None:
    """Write a checkpoint, each rank its part. All ranks together."""
    if ranks.rank == 0:
        checkpoint.mkdir(parents=True)
    learner.copy()
    files = ranks.gather(learner.write(checkpoint))
    if ranks.rank == 0:
        write_manifest(checkpoint, learner.version, [one for own in files for one in own])


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether tensors have the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
