"""vLLM samples from several clients' snapshots at once, each with its own adapters."""

import asyncio
import importlib.util
from pathlib import Path

import pytest
import torch
from vllm_agreement import ONE_THREAD, TOLERANCE, config, requests

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.models import policy
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import ModelSpec, ScoreRequest
from composer_mesh.plugins.tinker.models.trained_weights import AdapterWeights
from composer_mesh.plugins.tinker.served_sampler import ServedSamplerActor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `nox -s vllm` installs it", allow_module_level=True)


async def test_each_snapshot_is_sampled_with_its_adapters_however_many_take_turns(
    host: MeshHost, tmp_path: Path
) -> None:
    run = config("generator.max_concurrent=16", "serve.max_rank=8", "serve.snapshots_in_memory=2")
    folder, tokenizer = tmp_path / "policy", policy.build_tokenizer(["use the tool"] * 9, 300)
    model = policy.build_model(run.policy, tokenizer, seed=1).eval()
    policy.save_policy(model, tokenizer, folder)
    trainer = ClientTrainer(model, AdapterWeights(model, run.serve.lora_alpha), 8192, 8)
    snapshots = [""]
    for number, rank in enumerate((8, 4, 2)):
        spec = ModelSpec(rank, number, train_attn=rank != 2, train_unembed=False)
        trainer.open(f"m{number}", spec, None)
        weights = trainer.models[f"m{number}"].weights
        with torch.no_grad():
            weights.copy_(torch.randn(weights.shape) * 0.1)
        snapshots.append(str(tmp_path / f"{number}.safetensors"))
        trainer.save(f"m{number}", Path(snapshots[-1]), weights_only=True)

    sampler = await host.spawn(
        "sampler", ServedSamplerActor, env={**ONE_THREAD, **process_environment(run)}
    )
    await sampler.call("load", run, folder, deadline_s=300)
    for turn in range(2):
        asked = requests(12, 20, (1.0,))
        found = await asyncio.gather(
            *(sampler.call("sample", one, asked, deadline_s=300) for one in snapshots)
        )
        for snapshot, results in zip(snapshots, found, strict=True):
            await _agrees(sampler, snapshot, asked, results)
        different = {tuple(results[0].logprobs) for results in found}
        assert len(different) == len(snapshots), turn


async def _agrees(
    sampler: object,
    snapshot: str,
    asked: list[GenerationRequest],
    results: list[GenerationResult],
) -> None:
    whole = [one.prompt_ids + got.token_ids for one, got in zip(asked, results, strict=True)]
    scores = await sampler.call("score", snapshot, whole, ScoreRequest())  # type: ignore[attr-defined]
    for result, score in zip(results, scores, strict=True):
        expected = torch.from_numpy(score.logprobs[-len(result.token_ids) :])
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=TOLERANCE, rtol=0)
