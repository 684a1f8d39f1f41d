"""Generator actors: inference engine, concurrency and sampling distribution."""

from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    Concurrent,
    Cores,
    CountOrZero,
    Processes,
    Section,
    TemperatureAboveZero,
    Tokens,
    TopP,
)
from composer_mesh.configs.plugins import registered
from composer_mesh.configs.vllm import VllmConfig


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
