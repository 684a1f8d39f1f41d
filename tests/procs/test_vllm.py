"""vLLM agrees with the trainer, token by token, under weights that change while it samples."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_probe import EngineProbe, State

from composer_mesh.actors.engines.embedded_sampling import truncated
from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult, Truncation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make vllm` installs it", allow_module_level=True)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
TOLERANCE = 1e-3
"""Nats, in float32: what importance ratios near 1 can do with."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Versions:
    """A model in several versions, the first of them exported to `folder`."""

    model: Any
    states: list[State]
    folder: Path

    def logprobs(self, version: int, asked: GenerationRequest, tokens: list[int]) -> torch.Tensor:
        """The trainer's log-probs of the tokens after the prompt, under a version's weights."""
        self.model.load_state_dict(self.states[version])
        ids = torch.tensor([asked.prompt_ids + tokens])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        logits = logits[len(asked.prompt_ids) - 1 : -1] / (asked.temperature or 1.0)
        if asked.temperature:
            logits = torch.stack([truncated(row, asked.truncation) for row in logits])
        values = torch.log_softmax(logits, -1)
        return values.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


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


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["generator.engine=vllm", *overrides])


def requests(count: int, new: int, temperatures: tuple[float, ...]) -> list[GenerationRequest]:
    """Prompts of different lengths, a third of which begin alike, with budgets up to `new`."""
    rng = random.Random(count)
    begins = [rng.randrange(250) for _ in range(64)]
    return [
        GenerationRequest(
            f"r{index}",
            begins * (index % 3 == 0) + [rng.randrange(250) for _ in range(rng.randint(1, 90))],
            rng.randint(1, new),
            temperatures[index % len(temperatures)],
            rng.randrange(1 << 40),
            [],
        )
        for index in range(count)
    ]


def assert_agreement(
    versions: Versions, asked: list[GenerationRequest], results: list[GenerationResult]
) -> None:
    """Every log-prob is that of the version which its token is labelled with."""
    found = {result.request_id: result for result in results}
    assert found.keys() == {one.request_id for one in asked}
    for one in asked:
        result = found[one.request_id]
        assert len(result.token_ids) == one.max_new_tokens
        labels = torch.tensor(result.versions)
        assert result.versions == sorted(result.versions)
        for version in set(result.versions):
            expected = versions.logprobs(version, one, result.token_ids)[labels == version]
            sampled = torch.tensor(result.logprobs)[labels == version]
            torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=0)


def across(results: list[GenerationResult]) -> int:
    """How many requests were served by several versions."""
    return sum(len(set(result.versions)) > 1 for result in results)


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
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
