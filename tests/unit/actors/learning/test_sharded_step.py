"""What a step may be asked for is the same where the weights are sharded, here over one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from step_batches import batch_of

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import build_model as build_other
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks

NEEDS = ["entropies", "logits", "hidden_states"]
USERS_MODULE = """
from composer_mesh import LossInputs, LossOutputs, loss_needs


@loss_needs("entropies", "logits", "hidden_states")
def loss(inputs: LossInputs) -> LossOutputs:
    gain = (inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
    more = inputs.logits.logsumexp(-1).square().sum() + inputs.hidden_states.square().sum()
    return LossOutputs(loss=0.01 * more - 0.2 * inputs.entropies.sum() - gain)
"""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, whose process group is gone after the test."""
    yield Ranks()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("padding", [-3, 5])
def test_a_step_with_another_model_as_teacher_and_a_loss_on_logits_is_the_same_sharded(
    build_config: Any,
    build_model: Any,
    tokenizer: Any,
    write_module: Callable[[str, str], None],
    ranks: Ranks,
    tmp_path: Path,
    padding: int,
) -> None:
    write_module("users_sharded", USERS_MODULE)
    student = build_model(1)
    save_policy(student, tokenizer, tmp_path / "policy")
    sizes = build_config(policy={"hidden_size": 48, "heads": 3, "kv_heads": 3}).policy
    teacher = build_other(sizes, tokenizer, seed=5)
    teacher.resize_token_embeddings(len(student.lm_head.weight) + padding)
    save_policy(teacher, tokenizer, tmp_path / "teacher")
    other = {"teacher": "model", "teacher_model": {"path": tmp_path / "teacher"}}

    def trained(sharding: str) -> list[dict[str, Any]]:
        learner = Learner(
            build_config(
                trainer={"lr": 1e-2, "sharding": sharding, "microbatch_tokens": 512},
                loss={"type": "custom", "import_path": "users_sharded.loss", "needs": NEEDS},
                sdpo={"alpha": 0.5, "placement": "inline", **other},
            ),
            tmp_path / "policy",
            ranks,
        )
        rng = random.Random(1)
        batches = [replace(batch_of(student, rng, samples=6), step=step) for step in range(2)]
        return [learner.train(one, learner.own_teacher_outputs(one)) for one in batches]

    for whole, sharded in zip(trained("none"), trained("fsdp2"), strict=True):
        for name in ("loss/policy", "loss/sdpo", "policy/grad_norm"):
            assert sharded[name] == pytest.approx(whole[name], rel=1e-5)
            assert whole[name] != 0
