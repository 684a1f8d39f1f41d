"""Sequences and lengths with which a model is tried before it is trained or served.

What a layer computes may depend on lengths that no probe could reach: a window, a chunk, the scale
of a temperature. A probe makes them `SCALE` tokens for a while, and its sequences are longer. Ids
are random ones of the vocabulary, without those that stand for images, ends or padding.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.expert_routing import expert_sizes

SCALE = 8
LENGTHS = (29, 13, 11, 5)
"""Several of them fill a row as long as the first, and begin at no multiple of `SCALE`. It is long
enough to be shared."""

WINDOW = "sliding_window"
SCALES = (
    *(WINDOW, "attention_chunk_size", "floor_scale", "original_max_position_embeddings"),
    *("index_topk", "keep_window_size"),
)
"""What configs and layers call the lengths from which on they compute otherwise."""

ROPE = "rope_parameters"
SPECIAL = ("token_id", "token_index")
"""How the names of special tokens end in configs."""


def probe_ids(config: Any, count: int, seed: int = 0) -> list[int]:
    """Return random ids of a model's vocabulary, no special ones among them."""
    words, special = config.get_text_config().vocab_size, set(_special(config.to_dict()))
    usable = [one for one in range(words) if one not in special] or [*range(words)]
    return random.Random(seed).choices(usable, k=count)


def probe_sequences(config: Any) -> list[list[int]]:
    """Return sequences of `LENGTHS`; the second is what the first begins with."""
    sequences = [probe_ids(config, length, seed) for seed, length in enumerate(LENGTHS)]
    sequences[1] = sequences[0][: LENGTHS[1]]
    return sequences


def _special(table: dict[str, Any]) -> Iterator[int]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif str(name).endswith(SPECIAL):
            yield from value if isinstance(value, list) else [value]


def error_of(positions: Tensor, model: Any) -> float:
    """Return the largest error of positions [T]; of a mixture below float64 the median.

    Rounding gives single tokens of a mixture other experts, and so quite other states.
    """
    rerouted = expert_sizes(model.config) is not None and model.dtype != torch.float64
    return float(positions.median() if rerouted else positions.max())


def smallest_scale(model: Any) -> int | None:
    """Return the least number of tokens from which on the model computes otherwise, if it does."""
    found = [
        place[name]
        for place in _places(model)
        for name in SCALES
        if type(place.get(name)) is int and place[name] > 0
    ]
    return min(found, default=None)


@contextmanager
def short_scales(model: Any, kept: tuple[str, ...] = ()) -> Iterator[None]:
    """Make the model's scales at most `SCALE` tokens meanwhile, except those `kept`."""
    before = [
        (place, name, place[name])
        for place in _places(model)
        for name in SCALES
        if name not in kept and type(place.get(name)) is int and place[name] > SCALE
    ]
    try:
        for place, name, _ in before:
            place[name] = SCALE
        yield
    finally:
        for place, name, value in before:
            place[name] = value


def _places(model: Any) -> list[dict[str, Any]]:
    """Return the attributes of a model's configs and modules, and what is said of its positions."""
    modules = list(model.modules())
    configs = [model.config, model.config.get_text_config()]
    configs += [one.config for one in modules if hasattr(one, "config")]
    places = {id(one): vars(one) for one in [*configs, *modules]}
    for own in list(places.values()):
        ropes = own.get(ROPE)
        for rope in (ropes, *ropes.values()) if isinstance(ropes, dict) else ():
            if isinstance(rope, dict):
                places[id(rope)] = rope
    return list(places.values())
