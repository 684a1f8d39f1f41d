"""Exports a training model's weights under the names of the Hugging Face model.

Adapters are merged into the weights that they adapt. Moves no bytes between ranks and may run
concurrently with a forward.
"""

from typing import Any

from torch import Tensor

from composer_mesh.actors.models.lora import ADAPTER, PARTS, adapted_layers, merged
from composer_mesh.actors.models.sharding import own_weights

BASE = ".base_layer."


def export_state(model: Any) -> dict[str, Tensor]:
    """Return every tensor of the Hugging Face model, in the same order on every rank.

    Sharded tensors are `DTensor`s with this rank's rows. Several names of one tensor map to one
    object. Tensors without an adapter share memory with the model.
    """
    weights = own_weights(model)
    state = {
        name.replace(BASE, "."): tensor
        for name, tensor in weights.items()
        if not name.endswith(PARTS)
    }
    for name, layer in adapted_layers(model):
        base, down, up = (weights[name + part] for part in (f"{BASE}weight", *PARTS))
        state[f"{name}.weight"] = merged(base, down, up, layer.scaling[ADAPTER])
    return state
