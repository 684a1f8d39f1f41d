"""Collects what a folder tells of its model without reading weights.

The model is built without memory (torch's meta device). Its head is called with a few small numbers
in place of hidden states; the rest is tried on a small copy with random weights.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.attention_calls import UNTRIED
from composer_mesh.actors.models.checkpoint_names import CheckpointNames
from composer_mesh.actors.models.expert_parallel import expert_modules
from composer_mesh.actors.models.language_model import (
    PROBE_LOUDNESS,
    decoder_of,
    is_plain,
    layer_kinds,
    logit_scale,
    logit_softcap,
)
from composer_mesh.actors.models.lora import linear_layers
from composer_mesh.actors.models.policy import attention_of, empty_model
from composer_mesh.actors.models.probes import smallest_scale
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.actors.models.small_copy import copy_calls, made_copy, tried
from composer_mesh.losses.blocks import softcapped
from composer_mesh.planning.model_facts import INDEXED, ModelFacts
from composer_mesh.planning.model_refusals import UnknownLayers

WORDS, WIDTH, PROBE_IDS = 64, 8, 3
COMPRESSED = "compressed_sparse_attention"


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the `ModelFacts` of a folder as a dict for JSON, or why its weights do not fit."""
    names = CheckpointNames(folder)
    for told in names.differences():
        return {"error": f"has weights that do not fit its config.json: {told}"}
    return {"facts": asdict(_facts(names.model, folder))}


def _facts(model: Any, folder: Path) -> ModelFacts:
    text = model.config.get_text_config()
    calls, implementations = attention_of(folder)
    copy = made_copy(folder, implementations)
    if calls is None and copy is not None:
        calls = copy_calls(copy, text.num_hidden_layers)
    layers = [name.rpartition(".")[-1] for name in linear_layers(model)]
    return ModelFacts(
        name=type(model).__name__,
        rows=len(model.get_input_embeddings().weight),
        layers=text.num_hidden_layers,
        kinds=tuple(dict.fromkeys(layer_kinds(model.config))),
        listed=_listed(model),
        linear=tuple(sorted(set(layers))),
        positions=getattr(text, "max_position_embeddings", None),
        head=_head_difference(empty_model(folder)),
        attention=calls,
        implementations=implementations,
        tried={} if copy is None else tried(copy, calls, implementations),
        scale=smallest_scale(model),
        experts=tuple(sorted({len(next(one.parameters())) for one in expert_modules(model)})),
        softcap=logit_softcap(model.config),
        all_keys=_all_keys(text),
    )


def _all_keys(text: Any) -> int | None:
    """Return up to how many positions all keys are chosen; None without a choice.

    A choice by other means than an index is tried on the small copy.
    """
    kinds = layer_kinds(text)
    if COMPRESSED not in kinds and INDEXED not in kinds:
        return None
    found: int = text.index_topk
    return found if INDEXED in kinds else found * text.compress_rates[COMPRESSED]


def _listed(model: Any) -> bool:
    try:
        decoder_layers(model)
    except UnknownLayers:
        return False
    return True


class _States:
    """What a decoder returns, with nothing but hidden states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoder(nn.Module):
    """Stands for a decoder: whatever it is given, its hidden states are the same."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(self._states)


@torch.no_grad()
def _head_difference(model: Any) -> float | None:
    """Return by how much logits differ from those of a linear head, None where they do not.

    Of a model that needs more than hidden states for its logits nothing is known.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, PROBE_IDS, WIDTH, generator=generator)
    head = nn.Linear(WIDTH, WORDS, bias=False)
    head.weight.normal_(std=PROBE_LOUDNESS, generator=generator)
    decoder = decoder_of(model)
    place = next(name for name, module in model.named_modules() if module is decoder)
    try:
        model.set_submodule(place, _Decoder(states))
        model.set_output_embeddings(head)
        own = model(input_ids=torch.zeros(1, PROBE_IDS, dtype=torch.long), use_cache=False).logits
    except UNTRIED:
        return None  # the trainer compares numbers when it starts
    plain = softcapped(head(states * logit_scale(model.config)), logit_softcap(model.config))
    difference = float((own - plain).abs().max())
    return None if is_plain(difference, own) else difference
