"""Attention of a packed row, each sequence by itself, as a transformers attention function.

A mask of the row would be dense, and its scores would grow with the square of the row's length.
Imported where it is used, since transformers comes with it.

Axes: H query heads, L tokens of the row, D head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_mesh.actors.models.attention_calls import MORE, PACKED
from composer_mesh.actors.models.hidden_states import PackedRow
from composer_mesh.planning.model_facts import CHUNKED, FULL, SLIDING, AttentionCall

WINDOWS: dict[str, bool] = {FULL: False, SLIDING: True, CHUNKED: False}
"""The kinds of layers that can be computed by sequences, and whether they have a window."""

LEAST_BLOCK = 512
"""Queries of one block in a layer with a window: fewer are no faster."""


def computes_by_sequences(calls: Sequence[AttentionCall] | None, kinds: Sequence[str]) -> bool:
    """Whether a model of these attention calls, of layers of these kinds, attends by sequences.

    All its layers hand their arguments to an attention function, their windows too. One kind is
    that of all layers.
    """
    kinds = [*kinds] * len(calls or ()) if len(kinds) == 1 else kinds
    if not calls or len(calls) != len(kinds):
        return False
    return all(
        call.replaceable and not call.more and WINDOWS.get(kind) == (call.window is not None)
        for call, kind in zip(calls, kinds, strict=True)
    )


@torch.compiler.disable
def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRow | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [1, L, H, D]: each sequence of the row `packed` attends to itself, causally.

    In a chunked layer each chunk of a sequence attends to itself, as if it were a sequence.
    With a context, its tensors are of this rank's positions of the row. Without `packed`,
    transformers' "sdpa". Raises ValueError for caps, sinks and biases.
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    if unsupported := [name for name in MORE if others.get(name) is not None]:
        raise ValueError(
            f"attention has {', '.join(unsupported)}, which packed rows do not compute"
        )
    context, lengths = packed.context, packed.chunks(_chunk(module))
    if context is not None:
        key, value = context.repeated(key), context.repeated(value)
        query, key, value = (context.exchanged(one) for one in (query, key, value))
        module = _SomeHeads(module, query.shape[1] // key.shape[1])
    queries, keys, values = (one.split(lengths, dim=2) for one in (query, key, value))
    outputs = [
        _causal(module, own_queries, own_keys, own_values, sliding_window, others)
        for own_queries, own_keys, own_values in zip(queries, keys, values, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return (output if context is None else context.exchanged(output)), None


def _chunk(layer: Any) -> int | None:
    """Return the chunk's size of a chunked layer, None for any other."""
    config = getattr(layer, "config", None)
    kinds = getattr(config, "layer_types", None)
    if config is None or not kinds or kinds[layer.layer_idx] != CHUNKED:
        return None
    return config.attention_chunk_size


class _SomeHeads:
    """What an attention function reads of a layer, for the heads that one rank computes."""

    def __init__(self, module: Any, groups: int) -> None:
        self.num_key_value_groups = groups
        self.is_causal = getattr(module, "is_causal", True)


def _causal(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    others: dict[str, Any],
) -> Tensor:
    """Return the attention of one sequence [1, L, H, D]."""
    if window is not None and window < query.shape[2]:
        return _windowed(module, query, key, value, window, others)
    return sdpa_attention_forward(module, query, key, value, None, **others)[0]


def _windowed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    others: dict[str, Any],
) -> Tensor:
    """Return the attention of one sequence in which a token sees `window` tokens, its own last.

    A block of queries sees its own keys and those of the block before, which is no shorter than the
    window: memory and time grow with the length.
    """
    block = max(window, LEAST_BLOCK)
    queries, keys, values = (one.split(block, dim=2) for one in (query, key, value))
    outputs = []
    for number, own_queries in enumerate(queries):
        near = slice(max(0, number - 1), number + 1)
        seen = torch.cat(keys[near], dim=2), torch.cat(values[near], dim=2)
        mask = _window_mask(own_queries.shape[2], seen[0].shape[2], window, query.device)
        outputs.append(sdpa_attention_forward(module, own_queries, *seen, mask, **others)[0])
    return torch.cat(outputs, dim=1)


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return which of the keys [1, 1, queries, keys] the last positions of as many see."""
    places = torch.arange(keys, device=device)
    back = places[keys - queries :, None] - places
    return ((back >= 0) & (back < window))[None, None]


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
