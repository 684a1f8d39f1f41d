"""The dimensions that determine KV-cache size, from a config or a `config.json`.

Loads no model and no torch, so that a run can be refused before anything starts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.planning.model_sizes import head_width


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
        path, sizes = policy.path, policy.sizes
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
