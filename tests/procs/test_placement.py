"""A placed process has what it was given, and needs about as much memory as was estimated."""

from __future__ import annotations

import os
from typing import Any

from placed_actors import PlacedActor

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.mesh.process_resources import share_env
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.planning.memory import MODEL_PROCESS, RankTraining, in_gb, total, training_parts
from composer_mesh.planning.model_sizes import parameter_count

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


async def test_a_process_has_the_cores_threads_and_gpus_that_its_placement_gave_it(
    host: MeshHost,
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    last = len(allowed) - 1
    env = share_env(1, cores=[last], gpus=[1]) | {"CUDA_VISIBLE_DEVICES": "4,6"}
    actor = await host.spawn("placed", PlacedActor, env=env)
    assert await actor.call("has") == {"cores": [allowed[last]], "gpus": "6", "threads": 1}


async def test_a_training_step_takes_no_more_memory_than_is_estimated_and_not_much_less(
    host: MeshHost,
) -> None:
    actor = await host.spawn("placed", PlacedActor, env=share_env(1))
    tokens, sizes = 2048, ModelSizes.model_validate(SIZES)
    taken = await actor.call("trained", SIZES, tokens, 512)
    how = RankTraining(ranks=1, tokens=tokens, trainable=parameter_count(sizes))
    parts = training_parts(sizes, how)
    estimate = MODEL_PROCESS + total(parts)
    assert taken <= estimate <= 1.5 * taken, f"{in_gb(estimate)} GB, took {in_gb(taken)}"
