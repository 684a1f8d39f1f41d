"""vLLM with adapters that change while it samples agrees with the trainer, token by token."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from engine_probe import EngineProbe
from vllm_agreement import ONE_THREAD, Versions, across, assert_agreement, config, requests

from composer_mesh.actors.engines.vllm_settings import process_environment
from composer_mesh.actors.models import policy
from composer_mesh.actors.models.lora import adapter_weights, add_adapters
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `nox -s vllm` installs it", allow_module_level=True)
pytest.importorskip("peft", exc_type=ModuleNotFoundError)


def adapted_versions(run: Config, folder: Path, versions: int) -> Versions:
    """The adapters of a new trainer, and of updates that each move them visibly."""
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    model = policy.build_model(run.policy, tokenizer, seed=1).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape) * 0.1)
    policy.save_policy(model, tokenizer, folder)
    assert run.trainer.lora is not None
    add_adapters(model, run.trainer.lora, 0)
    states = [{name: one.detach().clone() for name, one in adapter_weights(model).items()}]
    for _ in range(versions - 1):
        states.append({name: torch.randn(one.shape) * 0.2 for name, one in states[0].items()})
    return Versions(model, states, folder)


@pytest.mark.parametrize("targets", ["", "trainer.lora.targets=['q_proj','down_proj']"])
async def test_log_probs_are_the_trainers_with_adapters_that_change_in_flight(
    host: MeshHost, tmp_path: Path, targets: str
) -> None:
    torch.manual_seed(0)
    run = config(
        "generator.max_concurrent=32",
        "generator.max_new_tokens=63",
        "trainer.lora.rank=4",
        "trainer.lora.sync=adapters",
        "sdpo.placement=inline",
        *filter(None, [targets]),
    )
    versions = adapted_versions(run, tmp_path / "policy", 8)
    probe = await host.spawn("probe", EngineProbe, env={**ONE_THREAD, **process_environment(run)})
    await probe.call("load", run, versions.folder)
    before = requests(20, 20, (1.0, 0.0))
    results = await probe.call("serve", before, [], 1)
    assert_agreement(versions, before, results)

    asked = requests(80, 60, (1.0, 0.0, 0.6))
    results = await probe.call("serve", asked, versions.states[1:], 6)
    assert {version for result in results for version in result.versions} == set(range(8))
    assert across(results) > 20
    assert_agreement(versions, asked, results)
