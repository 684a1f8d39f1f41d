"""What the fork servers of a run import before the first fork: what most of its processes use.

Everything here is free of Monarch, whose threads a fork would not have.
"""

from __future__ import annotations

PRELOAD = (
    *("torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "httpx", "jaxtyping"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
    *("composer_mesh.configs.schema", "composer_mesh.rollouts.chat"),
    *("composer_mesh.rollouts.packed_batch", "composer_mesh.losses.grpo"),
)
