"""Models of several families train while vLLM serves them, with updates in flight."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_probe import EngineProbe, State
from family_runs import batch_of_results
from model_families import family_folder

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import build_tokenizer, load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.configs.load import load_config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `nox -s vllm` installs it", allow_module_level=True)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FAMILIES = {
    "llama": "dense",
    "qwen3_moe": "experts, published fused and served one by one",
    "mixtral": "experts under other names",
    "mistral": "a window of 512 tokens",
    "gemma3_text": "a window of 8 tokens, shorter than every prompt",
    "gemma2": "a window, caps of logits and of attention",
    "falcon_h1": "states beside attention",
}
SERVED = {  # what vLLM's kernels for CPU are built for
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TOLERANCE = 1e-4
"""Nats, in float32: kernels differ."""
UPDATES = 3


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_trains_and_is_served_exactly_with_three_updates_in_flight(
    family: str, host: MeshHost, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(["use the tool"] * 9, 300)
    folder = family_folder(family, tokenizer, tmp_path / family, **SERVED)
    run = load_config(
        QUICKSTART,
        [
            "generator.engine=vllm",
            "generator.max_concurrent=8",
            "generator.max_new_tokens=40",
            "sdpo.alpha=0",
            "replay.beta=0",
            "trainer.lr=0.01",
            f"trainer.attention={'eager' if family == 'gemma2' else 'sdpa'}",
        ],
    )
    probe = await host.spawn("probe", EngineProbe, env={**ONE_THREAD, **process_environment(run)})
    await probe.call("load", run, folder)
    first = requests(8, 20)
    sampled = in_order(first, await probe.call("serve", first, [], 1))
    versions = trained(run, folder, first, sampled)
    asked = requests(24, 40)
    results = in_order(asked, await probe.call("serve", asked, versions[1:], 8))
    assert {version for one in results for version in one.versions} == set(range(UPDATES + 1))
    assert sum(len(set(one.versions)) > 1 for one in results) >= UPDATES
    own = difference(folder, versions, asked, results)
    assert own < TOLERANCE
    assert difference(folder, versions[:1] * len(versions), asked, results) > 100 * TOLERANCE


def requests(count: int, new: int) -> list[GenerationRequest]:
    rng = random.Random(count)
    return [
        GenerationRequest(
            f"{count}-{index}",
            [rng.randrange(250) for _ in range(rng.randint(10, 90))],
            rng.randint(2, new),
            1.0,
            rng.randrange(1 << 40),
            [],
        )
        for index in range(count)
    ]


def in_order(
    asked: list[GenerationRequest], results: list[GenerationResult]
) -> list[GenerationResult]:
    found = {one.request_id: one for one in results}
    return [found[one.request_id] for one in asked]


def trained(
    run: Any, folder: Path, asked: list[GenerationRequest], sampled: list[GenerationResult]
) -> list[State]:
    """The weights that a trainer publishes, before its first step and after each of three."""
    learner = Learner(run, folder, Ranks())
    versions = [exported(learner)]
    for step in range(UPDATES):
        learner.train(batch_of_results(step, [one.prompt_ids for one in asked], sampled), None)
        versions.append(exported(learner))
    return versions


def exported(learner: Learner) -> State:
    return {name: tensor.detach().clone() for name, tensor in learner.export().items()}


@torch.no_grad()
def difference(
    folder: Path,
    versions: list[State],
    asked: list[GenerationRequest],
    results: list[GenerationResult],
) -> float:
    """The largest difference of a sampled log-prob from that of its version's own logits."""
    model, largest = load_model(folder), 0.0
    for version, state in enumerate(versions):
        model.load_state_dict(state)
        for one, found in zip(asked, results, strict=True):
            if version not in found.versions:
                continue
            ids = torch.tensor([one.prompt_ids + found.token_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            own = logits[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
            own = own.gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]
            apart = (own - torch.tensor(found.logprobs)).abs()
            largest = max(largest, float(apart[torch.tensor(found.versions) == version].max()))
    return largest
