"""vLLM agrees with the trainer, token by token, under weights that change while it samples."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_probe import EngineProbe, State
from vllm_agreement import ONE_THREAD, Versions, across, assert_agreement, config, requests

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.models import policy
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.generation import GenerationRequest, Truncation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `nox -s vllm` installs it", allow_module_level=True)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Twenty updates, each as far from the last as a model is from its neighbour in training."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    model = policy.build_model(config().policy, tokenizer, seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    states: list[State] = []
    for _ in range(21):
        with torch.no_grad():
            for weights in model.parameters():
                step = torch.randn(weights.shape, generator=generator)
                weights.add_(step, alpha=0.1)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        if len(states) == 1:
            policy.save_policy(model, tokenizer, folder)
    return Versions(model, states, folder)


async def test_log_probs_are_the_trainers_before_and_after_twenty_updates_in_flight(
    host: MeshHost, versions: Versions
) -> None:
    run = config("generator.max_concurrent=32", "generator.max_new_tokens=63")
    probe = await host.spawn("probe", EngineProbe, env={**ONE_THREAD, **process_environment(run)})
    await probe.call("load", run, versions.folder)
    before = requests(40, 20, (1.0, 0.0, 0.6, 1.5))
    results = await probe.call("serve", before, [], 1)
    assert {version for result in results for version in result.versions} == {0}
    assert_agreement(versions, before, results)

    asked = requests(120, 60, (1.0, 0.0, 0.6, 1.5))
    results = await probe.call("serve", asked, versions.states[1:], 6)
    assert {version for result in results for version in result.versions} == set(range(21))
    assert across(results) > 60
    assert_agreement(versions, asked, results)


async def test_a_seed_samples_the_same_whatever_is_batched_beside_it(
    host: MeshHost, versions: Versions
) -> None:
    run = config("generator.max_concurrent=32", "generator.max_new_tokens=63")
    generator = await host.spawn(
        "generator-0", GeneratorActor, env={**ONE_THREAD, **process_environment(run)}
    )
    await generator.call("load", run, versions.folder)
    asked = requests(60, 30, (1.0, 0.7))
    together = await asyncio.gather(*(generator.call("generate", one) for one in asked))
    assert_agreement(versions, asked, together)
    for one, result in list(zip(asked, together, strict=True))[:12]:
        alone = await generator.call("generate", one)
        assert alone.token_ids == result.token_ids
    stop = together[0].token_ids[-1]
    first = together[0].token_ids.index(stop)
    stopped = GenerationRequest(
        "stopped", asked[0].prompt_ids, 60, asked[0].temperature, asked[0].seed, [stop]
    )
    result = await generator.call("generate", stopped)
    assert (result.stop_reason, result.token_ids) == ("stop", together[0].token_ids[: first + 1])


async def test_log_probs_of_truncated_sampling_are_those_of_what_may_be_sampled(
    host: MeshHost, versions: Versions
) -> None:
    run = config("generator.max_concurrent=32", "generator.max_new_tokens=63")
    probe = await host.spawn("probe", EngineProbe, env={**ONE_THREAD, **process_environment(run)})
    await probe.call("load", run, versions.folder)
    cuts = [Truncation(top_p=0.7), Truncation(top_k=5), Truncation(min_p=0.1), Truncation()]
    cuts += [Truncation(top_p=0.9, top_k=40, min_p=0.02)]
    asked = [
        replace(one, truncation=cuts[index % len(cuts)])
        for index, one in enumerate(requests(60, 30, (1.0, 0.6, 0.0)))
    ]
    results = await probe.call("serve", asked, versions.states[1:3], 6)
    assert_agreement(versions, asked, results)


async def test_two_workers_share_a_model_take_updates_and_one_that_dies_is_no_hang(
    host: MeshHost, versions: Versions
) -> None:
    run = config("generator.vllm.tensor_parallel=2", "generator.max_new_tokens=63")
    env = {**ONE_THREAD, **process_environment(run)}
    probe = await host.spawn("probe", EngineProbe, env=env)
    await probe.call("load", run, versions.folder, deadline_s=300)
    asked = requests(30, 40, (1.0, 0.0))
    results = await probe.call("serve", asked, versions.states[1:4], 8)
    assert across(results) > 10
    assert_agreement(versions, asked, results)

    endless = [GenerationRequest(f"e{seed}", [1], 380, 1.0, seed, []) for seed in range(64)]
    serving = asyncio.ensure_future(probe.call("serve", endless * 100, [], 1))
    os.kill(workers(probe.pid)[1], signal.SIGKILL)
    with pytest.raises(Exception, match=r"(?i)executor|cancelled|worker"):
        await asyncio.wait_for(serving, 100)


def workers(pid: int) -> list[int]:
    """The processes that vLLM started inside a generator."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == str(pid) and "resource_tracker" not in command:
            found.append(int(folder.name))
    return sorted(found)
