"""Attention of packed tokens over the rows of a cache, as a transformers attention function.

A forward sees all its tokens as one sequence without padding: first one token of each decoding row,
then the runs of tokens that extend rows. Only attention distinguishes the sequences. A model with
this attention function behaves as with "sdpa" for other callers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_mesh.actors.engines.kv_cache import RowCache
from composer_mesh.actors.models.attention_calls import MORE

NAME = "composer_mesh_rows"


@dataclass(slots=True)
class Run:
    """Tokens `start` to `end` of a row; the row already holds what precedes them."""

    row: int
    start: int
    end: int
    bias: Tensor | None = None


@dataclass(slots=True)
class Packed:
    """Layout of one forward's tokens: those of rows 0 to `decoding` - 1, then the runs.

    Valid for one forward: the first layer computes what its layers share.
    """

    cache: RowCache
    decoding: int
    runs: list[Run]
    positions: Tensor
    """Position of each token in its row `[tokens]`, on the model's device."""
    longest: int
    """Length of the longest decoding row, including its new token."""
    ragged: bool
    """Whether decoding rows have different lengths."""
    _bias: Tensor | None = field(default=None, init=False)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """Store keys and values; return `[tokens, heads, width]` of a query `[heads, tokens, D]`.

        `key` and `value` are `[kv_heads, tokens, D]`.
        """
        keys, values = self.cache.write(layer, key, value)
        parts = [self._decode(query, keys, values, scale)] if self.decoding else []
        at = self.decoding
        for run in self.runs:
            here = slice(at, at := at + run.end - run.start)
            if run.start:
                parts.append(_continue(run, query[:, here], keys, values, scale))
            else:
                parts.append(_begin(query[:, here], key[:, here], value[:, here], scale))
        # Models may take views of it, as of what transformers' own functions return.
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Batch query heads that share keys as queries of one head, which avoids key copies."""
        rows, heads = self.decoding, len(query)
        if self.ragged and self._bias is None:
            here = torch.arange(self.longest, device=query.device)
            allowed = here <= self.positions[:rows, None]
            self._bias = _bias(allowed, query.dtype)[:, None, None]
        output = scaled_dot_product_attention(
            query[:, :rows].transpose(0, 1).reshape(rows, keys.shape[1], -1, query.shape[2]),
            keys[:rows, :, : self.longest],
            values[:rows, :, : self.longest],
            attn_mask=self._bias,
            scale=scale,
        )
        return output.reshape(rows, heads, -1)


def _begin(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend causally among a row's first tokens."""
    output = scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def _continue(run: Run, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attend from new tokens of a row also to its earlier ones."""
    heads, tokens, width = query.shape
    groups = keys.shape[1]
    if run.bias is None:
        here = torch.arange(run.end, device=query.device)
        allowed = here <= here[run.start :, None]
        run.bias = _bias(allowed, query.dtype).repeat(heads // groups, 1)
    output = scaled_dot_product_attention(
        query.reshape(1, groups, -1, width),
        keys[run.row, None, :, : run.end],
        values[run.row, None, :, : run.end],
        attn_mask=run.bias,
        scale=scale,
    )
    return output.reshape(heads, tokens, -1).transpose(0, 1)


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )


def rows_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of a forward with `packed=`; without it, transformers' "sdpa".

    Raises ValueError for a sliding window that is shorter than a row, and for caps and sinks.
    """
    if packed is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return plain
    if sliding_window is not None and sliding_window < packed.cache.length:
        raise ValueError(
            f"attention looks back {sliding_window} tokens but a row has {packed.cache.length}"
        )
    if asked := [name for name in MORE if others.get(name) is not None]:
        raise ValueError(f"attention has {', '.join(asked)}")
    return packed.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, rows_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
