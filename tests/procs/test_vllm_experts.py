"""vLLM tells the experts of a mixture: reused, recomputed, of other weights, and in a whole run."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import counted_letters
import pytest
import torch
from engine_probe import EngineProbe, State
from live_run import launched
from mixture_runs import (
    SIZES,
    VOCABULARY,
    batch_of,
    chosen_by,
    coarse_folder,
    intercepted,
    prompts_of,
    told_by,
)
from model_families import family_folder
from vllm_agreement import ONE_THREAD, config

from composer_mesh.actors.engines.vllm_settings import (
    GB,
    AttentionShape,
    engine_arguments,
    process_environment,
)
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import build_tokenizer, load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `nox -s vllm` installs it", allow_module_level=True)


REPLAY = ("trainer.moe.router_replay=true", "sdpo.alpha=0", "replay.beta=0")
SERVED = {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96}
"""What vLLM's kernels for CPU are built for."""
LAYERS = {**SIZES, **SERVED, "num_hidden_layers": 3, "mlp_only_layers": [1]}
"""A mixture whose second layer is dense."""
CACHE = 0.001
"""GB, which eight requests fill before they end: some are preempted, and computed again."""
SAME = 0.999
"""The least share of equal experts in float32: where two score the same, kernels differ."""


def mixture(folder: Path) -> Path:
    tokenizer = build_tokenizer(["use the tool"] * 9, 300)
    torch.manual_seed(1)
    return family_folder("qwen3_moe", tokenizer, folder, **LAYERS)


def versions_of(folder: Path, count: int) -> list[State]:
    """The weights of the folder, and others, each of which chooses other experts."""
    state = {name: one.clone() for name, one in load_model(folder).state_dict().items()}
    states = [state]
    for _ in range(count):
        states.append({n: one + 0.1 * torch.randn(one.shape) for n, one in states[-1].items()})
    return states


def asked(count: int, prompt: int, new: int) -> list[GenerationRequest]:
    rng = random.Random(count)
    begins = [rng.randrange(VOCABULARY) for _ in range(40)]
    return [
        GenerationRequest(
            f"{count}-{index}",
            begins * (index % 2) + [rng.randrange(VOCABULARY) for _ in range(prompt)],
            rng.randint(new // 2, new),
            1.0,
            index,
            [],
            experts_from=0,
        )
        for index in range(count)
    ]


def next_turn(request: GenerationRequest, result: GenerationResult) -> GenerationRequest:
    """What an episode asks next: the experts of the positions that no turn has told."""
    before = [*request.prompt_ids, *result.token_ids]
    more, start = [*before, 9, 8, 7], len(before) - 1
    name = f"{request.request_id} again"
    return replace(request, request_id=name, prompt_ids=more, experts_from=start)


def share_of_same(
    model: Any, states: list[State], requests: list[GenerationRequest], results: list[Any]
) -> float:
    """The share of experts that are those of plain forwards with the weights of the last token."""
    found = {one.request_id: one for one in results}
    same = total = 0
    for version, state in enumerate(states):
        model.load_state_dict(state)
        for one in requests:
            result = found[one.request_id]
            if result.versions[-1] != version:
                continue
            wanted = chosen_by(model, [*one.prompt_ids, *result.token_ids])[one.experts_from : -1]
            told = told_by(result)
            assert told.shape == wanted.shape
            same, total = same + int((told == wanted).sum()), total + wanted.numel()
    return same / total


@pytest.mark.parametrize("workers", [1, 2])
async def test_experts_are_those_of_a_plain_forward_whatever_became_of_their_keys(
    workers: int, host: MeshHost, tmp_path: Path
) -> None:
    """Of prompts, reused prefixes, preempted requests, and requests with updates in flight."""
    folder = mixture(tmp_path / "mixture")
    run = config(
        *REPLAY,
        "generator.max_concurrent=8",
        f"generator.vllm.tensor_parallel={workers}",
        f"generator.vllm.kv_cache_gb={CACHE / workers}",
        f"policy.path={folder}",
    )
    env = {**ONE_THREAD, **process_environment(run)}
    probe = await host.spawn("probe", EngineProbe, env=env)
    await probe.call("load", run, folder, deadline_s=300)
    states = versions_of(folder, 3)
    model = intercepted(load_model(folder))

    first = asked(16, 20, 160)
    lengths = sorted(len(one.prompt_ids) + one.max_new_tokens for one in first)
    assert sum(lengths[:8]) * AttentionShape.of_folder(folder).cache_bytes(1, 4) > 1.3 * CACHE * GB
    results = await probe.call("serve", first, [], 1)
    assert share_of_same(model, states[:1], first, results) > SAME

    found = {one.request_id: one for one in results}
    second = [next_turn(one, found[one.request_id]) for one in first[-4:]]
    results = await probe.call("serve", second, [], 1)
    assert sum(one.cached_tokens for one in results) > 64
    assert share_of_same(model, states[:1], second, results) > SAME

    third = asked(12, 30, 100)
    results = await probe.call("serve", third, states[1:], 20)
    assert sum(len(set(one.versions)) > 1 for one in results) > 3
    assert share_of_same(model, states, third, results) > SAME
    assert share_of_same(model, states[:1] * 4, third, results) < 0.9


async def test_replay_divides_the_mismatch_of_a_bfloat16_mixture_by_five(
    host: MeshHost, tmp_path: Path
) -> None:
    """Its routers' logits are rounded coarsely, so that rounding often decides."""
    torch.manual_seed(1)
    tokenizer = build_tokenizer(["use the tool"] * 9, 300)
    folder = coarse_folder(tokenizer, tmp_path / "mixture", **SERVED)
    run = config(
        *REPLAY,
        "trainer.moe.compare_every=1",
        "trainer.compute_dtype=bfloat16",
        "generator.dtype=bfloat16",
        "generator.max_concurrent=8",
        f"policy.path={folder}",
    )
    probe = await host.spawn("probe", EngineProbe, env={**ONE_THREAD, **process_environment(run)})
    await probe.call("load", run, folder, deadline_s=300)
    prompts = prompts_of(random.Random(0), 12)
    requests = [
        GenerationRequest(str(n), prompt, 60, 1.0, n, [], experts_from=0)
        for n, prompt in enumerate(prompts)
    ]
    found = {one.request_id: one for one in await probe.call("serve", requests, [], 1)}
    batch = batch_of(prompts, [found[one.request_id] for one in requests])
    figures = Learner(run, folder, Ranks()).train(batch, None)
    without = figures["logprob_mismatch/without_replay/mean"]
    assert without > 5 * figures["logprob_mismatch/mean"]
    assert 0 < figures["moe/rerouted"] < 0.3


def test_a_run_whose_engine_is_vllm_trains_with_the_experts_of_all_turns(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {
        "run.steps": 3,
        "data.task": f"{counted_letters.__file__}:CountedLetters",
        "policy.path": mixture(tmp_path / "mixture"),
        "schedule.max_lag": 0,
        "generator.engine": "vllm",
        "generator.max_concurrent": 8,
        "generator.max_new_tokens": 30,
        "trainer.lr": 0.01,
        "trainer.moe.router_replay": "true",
        "sdpo.alpha": 0,
        "replay.beta": 0,
        "eval.episodes": 2,
    }
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    for trace in run.traces():
        experts = trace.expert_choices()
        assert experts is not None
        assert (experts.positions, experts.layers) == (len(trace.token_ids()) - 1, 2)
        assert len(trace.turns) > 1
    for step in run.objects("metrics.jsonl"):
        assert step["moe/rerouted"] < 1 - SAME
        assert step["logprob_mismatch/max"] < 1e-3


def test_vllm_on_a_cpu_does_not_return_experts_itself(tmp_path: Path) -> None:
    """Why our worker notes them there; where this fails, it may not be needed any more."""
    from vllm import EngineArgs

    folder = mixture(tmp_path / "mixture")
    arguments = engine_arguments(config(*REPLAY, f"policy.path={folder}"), folder)
    with pytest.raises(ValueError, match="AuxOutput Connector requires Model Runner V2"):
        EngineArgs(**arguments, enable_return_routed_experts=True).create_engine_config()


def test_what_vllm_returns_on_a_gpu_is_what_is_read() -> None:
    """The names by which its experts are asked for and read, which a stand-in has in unit tests."""
    from dataclasses import fields

    from vllm import EngineArgs, SamplingParams
    from vllm.outputs import CompletionOutput

    assert "enable_return_routed_experts" in {one.name for one in fields(EngineArgs)}
    assert "routed_experts" in {one.name for one in fields(CompletionOutput)}
    assert SamplingParams(routed_experts_prompt_start=3).routed_experts_prompt_start == 3
