"""Generator actors: inference engine, concurrency and sampling distribution.

Settings of the vLLM engine, used if `generator.engine` is "vllm".

vLLM is not imported here; its installed version and model support are checked before a run starts.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    Concurrent,
    Cores,
    CountOrZero,
    FreeTable,
    Gigabytes,
    Processes,
    Section,
    TemperatureAboveZero,
    Tokens,
    TopP,
)
from composer_mesh.configs.plugins import registered

OWNED = {
    "model": "policy.path",
    "tokenizer": "policy.path",
    "skip_tokenizer_init": "no key, because token ids travel and not text",
    "dtype": "generator.dtype",
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
}
"""Engine arguments that are set by other config keys, with these keys."""


class VllmConfig(Section):
    """The vLLM engine inside each generator."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPU processes that share one copy of the model; more than 1 starts workers."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and KV cache; not used on CPU."""

    kv_cache_gb: Gigabytes | None = None
    """KV cache of each process in GB of 2**30 bytes; when not set, what gpu_memory_utilization
    leaves on a GPU, and max_concurrent conversations of full length on a CPU."""

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


class GeneratorConfig(Section):
    """The actors that sample tokens."""

    engine: Annotated[str, registered("engines")] = "embedded"
    """The inference engine: "embedded" has no further dependencies; "vllm" needs an extra."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the served weights and of the KV cache."""

    replicas: Processes = 1
    """Number of generator actors."""

    max_concurrent: Concurrent = 64
    """Maximum number of requests decoded together: rows of the KV cache."""

    prefix_tokens: CountOrZero | None = None
    """Maximum number of tokens whose keys and values the embedded engine keeps for later prompts;
    as many as its rows hold if not set, 0 keeps none."""

    max_new_tokens: Tokens = 40
    """Maximum number of tokens sampled in one turn."""

    temperature: TemperatureAboveZero = 1.0
    """Sampling temperature of training rollouts."""

    top_p: TopP = 1.0
    """Training rollouts sample from the most probable tokens whose probabilities reach this sum."""

    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Training rollouts sample from so many of the most probable tokens; 0 is all."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training rollouts sample only tokens with this share of the largest probability, or more."""

    threads: Cores = 1
    """CPU threads of each generator."""

    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of the vLLM engine; ignored by the embedded one."""
