"""The actors that sample tokens: which engine, how many at once, and from which distribution.

Whether an engine is installed is its loader's question.
"""

from typing import Literal

from composer_mesh.configs.base import Count, Positive, Section


class GeneratorConfig(Section):
    """The actors that sample tokens."""

    engine: Literal["embedded"] = "embedded"
    """The inference engine: "embedded" runs in the actor's own process."""

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
