"""How vLLM serves the policy where `generator.engine` is "vllm".

Which flavour of vLLM is installed, and whether it fits the model, is looked at before a run
starts; nothing here imports it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, Positive, Section

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
    "distributed_executor_backend": "generator.vllm.tensor_parallel",
}
"""Engine arguments that follow from other keys, with these keys."""


class VllmConfig(Section):
    """The vLLM engine inside each generator."""

    tensor_parallel: Count = 1
    """Processes, on a GPU each, that share one copy of the model; more than 1 starts workers."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and KV cache; on CPU it is not used."""

    kv_cache_gb: Positive | None = None
    """KV cache of each process in GB of 2**30 bytes; without it a GPU's is what
    gpu_memory_utilization leaves, and a CPU's holds max_concurrent whole conversations."""

    block_size: Literal[16, 32, 64, 128] = 32
    """Tokens of one block of the KV cache; CPU kernels want a multiple of 32."""

    enforce_eager: bool | None = None
    """Whether nothing is compiled or captured; without it so on CPU, and not on a GPU."""

    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share their cache; new weights always empty it."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, handed on as they are."""

    @model_validator(mode="after")
    def _engine_args_are_further_ones(self) -> Self:
        for name in self.engine_args:
            if name in OWNED:
                raise ValueError(
                    f"engine_args.{name} is {self.engine_args[name]!r} but follows from "
                    f"{OWNED[name]}: remove it from engine_args"
                )
        return self
