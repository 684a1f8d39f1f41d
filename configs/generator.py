"""The actors that sample tokens: which engine, how many at once, and from which distribution.

Whether an engine is installed is its loader's question.
"""

from typing import Literal

from pydantic import Field

from composer_mesh.configs.base import Count, Positive, Section
from composer_mesh.configs.vllm import VllmConfig


class GeneratorConfig(Section):
    """The actors that sample tokens."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """The inference engine: "embedded" needs nothing further; "vllm" comes with an extra."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that are served, and of the cache."""

    replicas: Count = 1
    """Generator actors."""

    max_concurrent: Count = 64
    """Requests that decode together: rows of the KV cache."""

    max_new_tokens: Count = 40
    """Longest answer of one turn, in tokens."""

    temperature: Positive = 1.0
    """Sampling temperature of training rollouts."""

    threads: Count = 1
    """CPU threads of each generator."""

    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """The vLLM engine; the embedded one reads nothing of it."""
