"""The vLLM engine of a generator: `[generator.vllm]`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import FreeTable, Gigabytes, Section

OWNED = {
    "model": "policy.path",
    "tokenizer": "policy.path",
    "skip_tokenizer_init": "no key, because token ids are sent, not text",
    "dtype": "generator.dtype",
    "quantization": "generator.quantization",
    "seed": "run.seed",
    "max_num_seqs": "generator.max_concurrent",
    "max_model_len": "policy.max_context",
    "logprobs_mode": "no key, because the trainer needs the distribution sampled from",
    "tensor_parallel_size": "generator.vllm.tensor_parallel",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_gb",
    "block_size": "generator.vllm.block_size",
    "enforce_eager": "generator.vllm.enforce_eager",
    "enable_prefix_caching": "generator.vllm.enable_prefix_caching",
    "enable_chunked_prefill": "no key, because seeded sampling allows it on GPUs only",
    "enable_return_routed_experts": "trainer.moe.router_replay",
    "aux_output_config": "trainer.moe.router_replay",
    "distributed_executor_backend": "generator.vllm.tensor_parallel",
    "pipeline_parallel_size": "generator.vllm.tensor_parallel",
    "data_parallel_size": "generator.replicas",
    "prefill_context_parallel_size": "generator.vllm.tensor_parallel",
}
"""Engine arguments that are set by other config keys, with these keys."""


class VllmConfig(Section):
    """The vLLM engine inside each generator."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPU processes that share one copy of the model; more than 1 starts workers."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and KV cache; not used on CPU."""

    kv_cache_gb: Gigabytes | None = None
    """KV cache of each process in GB of 2**30 bytes. When not set, a GPU has what
    gpu_memory_utilization leaves, and a CPU max_concurrent conversations of full length."""

    block_size: Literal[16, 32, 64, 128] = 32
    """Tokens per block of the KV cache; CPU kernels need a multiple of 32."""

    enforce_eager: bool | None = None
    """Whether compilation and graph capture are disabled; by default on CPU, not on GPU."""

    enable_prefix_caching: bool = True
    """Whether prompts with a common prefix share its cache; new weights always empty it."""

    engine_args: FreeTable = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, passed unmodified."""

    def _problems(self) -> Iterator[str]:
        for name in self.engine_args:
            if name in OWNED:
                yield (
                    f"engine_args.{name} is {self.engine_args[name]!r} but follows from "
                    f"{OWNED[name]}: remove it from engine_args"
                )
