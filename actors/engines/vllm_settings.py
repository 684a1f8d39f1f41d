"""What vLLM is told: the environment of its process and its engine arguments, from the config.

Imports neither vLLM nor torch; whether both fit is `vllm_checks`' question.
"""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.attention_shape import AttentionShape
from composer_mesh.actors.engines.vllm_installed import Flavour, VllmUnavailable
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.process_resources import own_gpu_share

ITEMSIZE = {"float32": 4, "bfloat16": 2}
GB = 2**30
HARMLESS = ("ignore:resource_tracker:UserWarning", "ignore:`torch.distributed:FutureWarning")
"""Warnings of vLLM's doings at its start and its end; workers and helpers of its heed them too."""


def flavour_of(config: Config) -> Flavour:
    """The flavour of vLLM that a run needs: that for GPUs where generators are given some."""
    return "cuda" if config.placement.gpus("generator") else "cpu"


def process_environment(config: Config) -> dict[str, str]:
    """What the process of a generator needs in its environment before vLLM is imported there."""
    if config.generator.engine != "vllm":
        return {}
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the generator's own process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), *HARMLESS])),
    }
    if flavour_of(config) == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # cores are the placement's to give
    return env


def engine_arguments(config: Config, folder: Path) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` that serve the model of `folder` as the config says."""
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
        # Requests name all that they want; a model's own defaults must not add to it.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": vllm.tensor_parallel,
        "distributed_executor_backend": "uni" if vllm.tensor_parallel == 1 else "mp",
        "kv_cache_memory_bytes": kv_cache_bytes(config, AttentionShape.of_folder(folder)),
        "block_size": vllm.block_size,
        "enforce_eager": eager,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        # A step that is under way during a swap would end with the label of the new version.
        "async_scheduling": False,
        # Taking back a draw for half a prompt ends the engine where generators have no offset.
        "enable_chunked_prefill": not on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not on_cpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization * own_gpu_share()
    return arguments | vllm.engine_args


def kv_cache_bytes(config: Config, shape: AttentionShape) -> int | None:
    """Bytes of the KV cache in each process; None leaves it to vLLM, by the memory of its GPU."""
    vllm = config.generator.vllm
    if vllm.kv_cache_gb is not None:
        return int(vllm.kv_cache_gb * GB)
    if flavour_of(config) == "cuda":
        return None
    return (config.generator.max_concurrent + 1) * conversation_bytes(shape, config)


def conversation_bytes(shape: AttentionShape, config: Config) -> int:
    """KV cache of one conversation of `max_context` tokens in one of the engine's processes."""
    vllm = config.generator.vllm
    blocks = -(-config.policy.max_context // vllm.block_size)
    whole = shape.cache_bytes(blocks * vllm.block_size, ITEMSIZE[config.generator.dtype])
    return -(-whole // min(vllm.tensor_parallel, shape.kv_heads))


def refuse_unknown(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `VllmUnavailable` for a further engine argument that vLLM does not know."""
    for name in set(given).difference(known):
        near = difflib.get_close_matches(name, known, n=1)
        repair = f"did you mean {near[0]}?" if near else "remove it"
        raise VllmUnavailable(
            f"generator.vllm.engine_args.{name} is no argument of this vLLM's EngineArgs: {repair}"
        )
