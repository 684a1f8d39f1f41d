"""Rollouts of a tiny mixture, sampled by the embedded engine with the experts that it chose."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from model_families import family_model

from composer_mesh.actors.engines.port import GenerationEngine, make_engine
from composer_mesh.actors.models.expert_routing import (
    ExpertRouting,
    intercept_routers,
    numbers_of,
    router_names,
)
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.channels.policy import policy_sample
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import Trace, Turn

NEW, PROMPT = 60, 20
VOCABULARY = 250
"""Ids of prompts are below it."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def coarse_folder(tokenizer: Any, folder: Path, **served: Any) -> Path:
    """A mixture whose router logits have a large part in common, which bfloat16 rounds coarsely.

    Which expert a token gets is then often decided by rounding, unless routers are in float32.
    """
    sizes = {**SIZES, "num_experts_per_tok": 1, "norm_topk_prob": True, **served}
    model = family_model("qwen3_moe", tokenizer, **sizes)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("gate.weight"):
                weights += 10 * torch.randn(weights.shape[1])
    save_policy(model, tokenizer, folder)
    return folder


def mixture_config(build_config: Any, folder: Path, **sections: Any) -> Config:
    """A run that trains a mixture in bfloat16, and serves it so."""
    moe = {"router_replay": True, **sections.pop("moe", {})}
    trainer = {"compute_dtype": "bfloat16", "moe": moe, "lr": 1e-3, **sections.pop("trainer", {})}
    return build_config(
        policy={"path": folder},
        trainer=trainer,
        generator={"dtype": "bfloat16", "max_concurrent": 4, "max_new_tokens": NEW},
        **sections,
    )


def answers(engine: GenerationEngine, prompts: list[list[int]], start: int | None = 0) -> list[Any]:
    """What an engine samples after each prompt; `start` is where its experts begin."""
    found: dict[str, GenerationResult] = {}
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(str(number), prompt, NEW, 1.0, number, [], experts_from=start)
        engine.submit(request, lambda result: found.__setitem__(result.request_id, result))
    while engine.busy:
        engine.step()
    return [found[str(number)] for number in range(len(prompts))]


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]


def intercepted(model: Any) -> Any:
    """The model of a mixture, which tells the experts of its forwards."""
    intercept_routers(model, decoder_layers(model), router_names(model), False, needed=True)
    return model


def chosen_by(model: Any, ids: list[int]) -> torch.Tensor:
    """The experts [positions, layers, per_token] of a plain forward, each token's in order."""
    routing = ExpertRouting()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False, expert_routing=routing)
    return routing.all_chosen().sort(-1).values


def told_by(result: GenerationResult) -> torch.Tensor:
    """The experts [positions, layers, per_token] of an answer, each token's in order."""
    assert result.experts is not None
    return numbers_of(result.experts).sort(-1).values


def sample_of(name: str, prompt: list[int], result: GenerationResult) -> PolicySample:
    turn = Turn(
        prompt,
        result.token_ids,
        result.logprobs,
        result.versions,
        result.stop_reason,
        experts=result.experts,
    )
    trace = Trace(name, 0, 0, "toolbox", "train", 0, [turn], [], 0.0, False, [])
    return policy_sample(trace, 0.5)


def sampled_batch(config: Config, folder: Path, count: int = 6) -> StepBatch:
    """A step's rollouts from the engine of a config."""
    prompts = prompts_of(random.Random(0), count)
    return batch_of(prompts, answers(make_engine(config, folder), prompts))


def batch_of(prompts: list[list[int]], found: list[GenerationResult]) -> StepBatch:
    """A step's rollouts of one turn each."""
    named = zip(prompts, found, strict=True)
    return StepBatch(0, [sample_of(f"t{n}", *one) for n, one in enumerate(named)], [], [])
