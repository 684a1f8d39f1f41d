"""TRL's AsyncGRPOTrainer without a GPU, by two replacements of what asks for CUDA in TRL 1.16.0.

    async_grpo_trainer.py line 1240   asks CUDA for the name of the device, of which it logs the MFU
    packing.py lines 161 to 187       computes attention along a tree by a CUDA kernel

The device has no name that TRL knows, so that it logs no MFU, and the attention is computed with
torch, registered by its name with transformers. The trainer itself runs as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@contextmanager
def named_cpu() -> Iterator[None]:
    """Let a trainer be made where there is no CUDA, and compute its attention with torch."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    with patch("torch.cuda.get_device_name", lambda _device=None: "cpu"):
        yield
    AttentionInterface.register(TREE_ATTENTION, tree_attention)  # in the place of the trainer's


def tree_attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Let each segment of a tree attend to the path from the root to itself, causally.

    `query` is [1, heads, N, D], `key` and `value` [1, kv heads, N, D]; the result [1, N, heads, D].
    """
    found = torch.empty_like(query)
    queries, keys = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for segment in range(len(queries) - 1):
        first, end = queries[segment], queries[segment + 1]
        path = tree_kv_index[keys[segment] : keys[segment + 1]]
        seen = torch.ones(end - first, len(path), dtype=torch.bool)
        found[:, :, first:end] = scaled_dot_product_attention(
            query[:, :, first:end],
            key[:, :, path],
            value[:, :, path],
            attn_mask=seen.tril(len(path) - (end - first)),
            scale=scaling,
            enable_gqa=True,
        )
    return found.transpose(1, 2), None
