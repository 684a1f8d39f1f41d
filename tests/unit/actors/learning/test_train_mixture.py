"""Steps of a mixture of experts: router replay, load balancing, and what the metrics tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mixture_runs import SIZES, coarse_folder, mixture_config, sampled_batch
from model_families import family_folder

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.ranks import Ranks


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    return family_folder("qwen3_moe", tokenizer, tmp_path, **SIZES)


@pytest.fixture(autouse=True)
def no_group_stays() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_replay_divides_the_mismatch_of_a_bfloat16_mixture_by_five(
    tokenizer: Any, tmp_path: Path, build_config: Any
) -> None:
    folder = coarse_folder(tokenizer, tmp_path)
    moe = {"compare_every": 1, "router_float32": False}
    config = mixture_config(build_config, folder, moe=moe)
    figures = Learner(config, folder, Ranks()).train(sampled_batch(config, folder), None)
    without = figures["logprob_mismatch/without_replay/mean"]
    assert without > 5 * figures["logprob_mismatch/mean"]
    assert 0 < figures["moe/rerouted"] < 0.2


def test_in_float32_replay_changes_nothing(folder: Path, build_config: Any) -> None:
    config = mixture_config(build_config, folder, trainer={"compute_dtype": "float32"})
    config = build_config(
        policy={"path": folder},
        trainer={"moe": {"router_replay": True, "compare_every": 1}},
        generator={"max_new_tokens": 100},
    )
    figures = Learner(config, folder, Ranks()).train(sampled_batch(config, folder), None)
    assert figures["logprob_mismatch/mean"] < 1e-5
    assert figures["logprob_mismatch/without_replay/mean"] < 1e-5
    assert figures["moe/rerouted"] == 0


def test_the_balance_loss_moves_routers_towards_equal_experts(
    folder: Path, build_config: Any
) -> None:
    found = []
    for weight in (0.0, 1.0):
        moe = {"load_balancing": weight, "router_replay": False}
        config = mixture_config(build_config, folder, moe=moe, trainer={"lr": 3e-3})
        replayed = mixture_config(build_config, folder)
        batch, learner = sampled_batch(replayed, folder), Learner(config, folder, Ranks())
        figures = [
            learner.train(
                replace(
                    batch,
                    step=step,
                    samples=[replace(one, advantage=0.0, experts=None) for one in batch.samples],
                ),
                None,
            )
            for step in range(6)
        ]
        found.append([one["moe/balance_loss"] for one in figures])
    assert found[0][-1] == pytest.approx(found[0][0], rel=1e-3)
    assert found[1][-1] < found[1][0] - 0.01


def test_microbatches_add_up_to_the_balance_loss_of_the_batch(
    folder: Path, build_config: Any
) -> None:
    figures = []
    for tokens in (512, 100_000):
        moe = {"load_balancing": 0.1}
        trainer = {"microbatch_tokens": tokens}
        config = mixture_config(build_config, folder, moe=moe, trainer=trainer)
        batch = sampled_batch(config, folder)
        figures.append(Learner(config, folder, Ranks()).train(batch, None))
    few, many = (one["moe/balance_loss"] for one in figures)
    assert few == pytest.approx(many, rel=0.15)
    assert 1 < many < 3
