"""What a model asks of its attention, seen without weights, and which implementations compute that.

A model's attention is called on torch's meta device with a function that notes its arguments.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer_mesh.planning.model_facts import AttentionCall

IMPLEMENTATIONS = {
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
    "eager": "eager",
}
"""transformers' names of what `trainer.attention` may be."""

PASSED_ON = "packed"
"""The keyword by which packed rows are handed to attention functions: by the trainer and the
embedded engine."""

PACKED = "composer_mesh_packed"
"""transformers' name of `packed_attention`; without the keyword above it is "sdpa"."""

MORE = ("softcap", "s_aux", "position_bias")
"""Arguments of attention beyond query, key, value, mask, scale and window: caps, sinks, biases."""

COMPUTED = {
    "sdpa": frozenset[str](),
    "flash": frozenset({"softcap"}),
    "flex": frozenset({"softcap", "s_aux"}),
    "eager": frozenset(MORE),
}
"""Which of `MORE` an implementation computes; transformers' others ignore what they do not know."""

NOTING = "composer_mesh_noting"
PROBE_IDS = 3
UNTRIED = (
    *(AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError),
)


@torch.no_grad()
def attention_calls(model: Any, device: str = "meta") -> tuple[AttentionCall, ...] | None:
    """Return the attention calls of a model's forward, None where an empty one needs numbers."""
    from transformers import AttentionInterface

    calls: list[AttentionCall] = []
    layers: list[int] = []

    def noting(*given: Any, **options: Any) -> tuple[Tensor, None]:
        layer, query, key, value, *_ = given
        heads, tokens = query.shape[1:3]
        again = getattr(layer, "layer_idx", None) in layers
        layers.append(getattr(layer, "layer_idx", len(calls)))
        calls.append(_call(options, (heads, key.shape[1], key.shape[3]), again))
        return query.new_zeros(query.shape[0], tokens, heads, value.shape[-1]), None

    AttentionInterface.register(NOTING, noting)
    try:
        model.set_attn_implementation(NOTING)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")
        with torch.device(device):
            ids = torch.zeros(1, PROBE_IDS, dtype=torch.long)
            model(input_ids=ids, use_cache=False, **{PASSED_ON: True})
    except UNTRIED:
        return None
    return tuple(calls)


def _call(options: Mapping[str, Any], sizes: tuple[int, int, int], again: bool) -> AttentionCall:
    """Return a call; the keys of a layer that is called `again` would replace those before."""
    more = tuple(name for name in MORE if options.get(name) is not None)
    return AttentionCall(
        PASSED_ON in options and not again, options.get("sliding_window"), more, *sizes
    )


def computing(calls: tuple[AttentionCall, ...] | None) -> tuple[str, ...]:
    """Return which of `IMPLEMENTATIONS` compute all that these calls ask for."""
    requested = {name for call in calls or () for name in call.more}
    return tuple(name for name in IMPLEMENTATIONS if requested <= COMPUTED[name])
